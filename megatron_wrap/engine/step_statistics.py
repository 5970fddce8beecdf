"""Statistics of the whole step: rows and metadata of all its samples, reduced by the flow to values that every
micro-batch gets. They are the same on each layout, however the batch is split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.engine.state.evaluation_mode import evaluation_mode
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.base import STEP_PREFIX
from megatron_wrap.parallel.collectives import broadcast_on, gather_objects, reduce_in_place

INDICES = STEP_PREFIX + "indices"
"""Loss input [n] int64: the indices of the micro-batch's samples in the global batch."""


def step_statistics(
    state: TrainingState,
    training: Sequence[MicroBatch],
    groups: Sequence[Sequence[MicroBatch]],
    num_samples: int,
) -> dict[str, Tensor]:
    """The flow's `reduce_step_values` of the rows of its `calculate_step_values` and of its `reduce_sample_facts`.
    Collective; without a graph, with the model in evaluation mode.

    Args:
        training: this replica's micro-batches, whose sample facts are reduced.
        groups: local micro-batches with the reference's outputs, whose rows are reduced; each group is one run of the
            schedule.
        num_samples: samples of the global batch, over all replicas.

    Returns:
        step_NAME -> value, equal on all ranks of the last pipeline stage; empty on other stages.

    Raises:
        FlowError: a method of the flow breaks its contract. DataError: the flow refuses the samples.
    """
    flow, parallel, device = state.flow, state.parallel, state.platform.device
    values = _reduced_facts(state, training, num_samples)
    with evaluation_mode(state):
        rows = _rows(state, groups)
        if not parallel.is_last_stage:
            return {}
        values = _gathered_rows(state, groups, rows, num_samples) | {
            name: value.to(device) for name, value in values.items()
        }
        reduced = flow.reduce_step_values(values)
    name = f"{type(flow).__name__}.reduce_step_values"
    if not isinstance(reduced, Mapping) or not all(isinstance(value, Tensor) for value in reduced.values()):
        raise FlowError(f"{name} must return a dictionary of tensors; return {{name: tensor}}")
    own = INDICES.removeprefix(STEP_PREFIX)
    if own in reduced:
        raise FlowError(f"{name} returns {own!r}, the name of the samples' indices; rename it")
    return {STEP_PREFIX + key: value for key, value in reduced.items()}


def with_statistics(micro_batches: Sequence[MicroBatch], statistics: Mapping[str, Tensor]) -> list[MicroBatch]:
    """Local micro-batches whose loss inputs also contain the statistics and INDICES."""
    if not statistics:  # not the last pipeline stage
        return list(micro_batches)
    device = next(iter(statistics.values())).device
    completed = []
    for micro_batch in micro_batches:
        indices = torch.tensor(micro_batch.sample_indices, dtype=torch.long, device=device)
        loss_inputs = {**micro_batch.loss_inputs, **statistics, INDICES: indices}
        completed.append(replace(micro_batch, loss_inputs=loss_inputs))
    return completed


def _reduced_facts(state: TrainingState, training: Sequence[MicroBatch], num_samples: int) -> dict[str, Tensor]:
    """The flow's `reduce_sample_facts` of all samples of the global batch, the same on every rank. Collective over
    replicas."""
    flow = state.flow
    if type(flow).get_sample_facts is MegatronWrapTrainingFlowBase.get_sample_facts:
        return {}
    by_index: dict[int, object] = {}
    for micro_batch in training:
        by_index.update(zip(micro_batch.sample_indices, micro_batch.sample_facts, strict=True))
    if state.parallel.dp.size > 1:
        for of_replica in gather_objects(by_index, state.parallel.dp_on_host):
            by_index |= of_replica
    return flow.reduce_sample_facts([by_index[index] for index in range(num_samples)])


def _rows(state: TrainingState, groups: Sequence[Sequence[MicroBatch]]) -> list[dict[str, Tensor]]:
    """The results of the flow's `calculate_step_values` for each micro-batch, on the last pipeline stage."""
    flow = state.flow
    if flow.step_values_from == "inputs":
        local = [micro_batch for group in groups for micro_batch in group] if state.parallel.is_last_stage else []
        return [flow.calculate_step_values(micro_batch.loss_inputs, None) for micro_batch in local]

    def rows_of(micro_batch: MicroBatch, output: Tensor) -> dict[str, Tensor]:
        return flow.calculate_step_values(micro_batch.loss_inputs, output)

    of_groups = [state.pipeline_schedule.forward(state.chunks, list(group), rows_of) for group in groups]
    return [rows for of_group in of_groups for rows in of_group]


def _gathered_rows(
    state: TrainingState,
    groups: Sequence[Sequence[MicroBatch]],
    rows: Sequence[Mapping[str, Tensor]],
    num_samples: int,
) -> dict[str, Tensor]:
    """Name -> the rows of all samples of the global batch, [N] or [N, K] in fp32, bit for bit the same on all ranks, so
    that a sort of close values is as well. Collective over the last pipeline stage."""
    flow, parallel = state.flow, state.parallel
    names = sorted(rows[0])
    if not names:  # a flow of facts alone
        return {}
    shapes = {name: rows[0][name].shape[1:] for name in names}
    widths = [shape.numel() for shape in shapes.values()]
    table = torch.zeros(num_samples, sum(widths), device=state.platform.device)
    micro_batches = [micro_batch for group in groups for micro_batch in group]
    for micro_batch, named in zip(micro_batches, rows, strict=True):
        if micro_batch.counted:
            columns = [_row(flow, name, named, shape, micro_batch.num_samples) for name, shape in shapes.items()]
            table[list(micro_batch.sample_indices)] = torch.cat(columns, dim=1)
    for axis in (parallel.tp, parallel.cp):
        broadcast_on(table, 0, axis.group)
    reduce_in_place(table, "sum", parallel.dp.group)  # each row has one summand
    of_names = zip(names, table.split(widths, dim=1), strict=True)
    return {name: column.reshape(num_samples, *shapes[name]) for name, column in of_names}


def _row(
    flow: MegatronWrapTrainingFlowBase,
    name: str,
    named: Mapping[str, Tensor],
    row_shape: Sequence[int],
    num_samples: int,
) -> Tensor:
    """The K numbers of each sample, [n, K] in fp32."""
    row = named.get(name)
    if row is None or tuple(row.shape) != (num_samples, *row_shape):
        problem = "is missing in one micro-batch" if row is None else f"has shape {tuple(row.shape)}"
        raise FlowError(
            f"{type(flow).__name__}.calculate_step_values: {name!r} {problem}; return one row for each of the "
            f"{num_samples} samples, with the same names and shapes for every micro-batch"
        )
    return row.float().reshape(num_samples, -1)
