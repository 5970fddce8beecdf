"""Statistics of the whole step: rows of all micro-batches and replicas, reduced by the flow to values that every
micro-batch gets, on each layout and cut the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_wrap.engine.micro_batch import MicroBatch
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.parallel.collectives import broadcast_on, reduce_in_place

PREFIX = "step_"
"""Prefix of the names of the values among the loss inputs."""
PLACES = "step_places"
"""Loss input [n] int64: the places of the micro-batch's samples in the global batch."""


def split_step_values(micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """(micro-batches to train on, those for the statistics alone) from `prepare_batch`."""
    trained = [micro_batch for micro_batch in micro_batches if not micro_batch.for_step_values]
    return trained, [micro_batch for micro_batch in micro_batches if micro_batch.for_step_values]


def step_values(state: TrainingState, groups: Sequence[list[MicroBatch]], num_samples: int) -> dict[str, Tensor]:
    """The flow's `reduce_step_values` of the rows of its `calculate_step_values`. Collective; without a graph, and the
    caller switches the model to evaluation.

    Args:
        groups: local micro-batches with the reference's outputs, each list for one run of the schedule.
        num_samples: samples of the global batch, over all replicas.

    Returns:
        step_NAME -> value, equal on all ranks of the last pipeline stage; empty on other stages.

    Raises:
        FlowError: a method of the flow breaks its contract.
    """
    flow, parallel = state.flow, state.parallel
    with torch.no_grad():
        micro_batches = [micro_batch for group in groups for micro_batch in group]
        rows = _rows(state, groups)
        if not parallel.is_last_stage:
            return {}
        names = sorted(rows[0])
        widths = [rows[0][name].shape[1:].numel() for name in names]
        table = torch.zeros(num_samples, sum(widths), device=state.platform.device)
        for micro_batch, named in zip(micro_batches, rows, strict=True):
            if micro_batch.counted:
                found = [_row(flow, name, named, rows[0][name].shape[1:], micro_batch.num_samples) for name in names]
                table[list(micro_batch.places)] = torch.cat(found, dim=1)
        # bit for bit the same on all ranks, so that a sort of close values is, too; each place has one summand
        for axis in (parallel.tp, parallel.cp):
            broadcast_on(table, 0, axis.group)
        reduce_in_place(table, "sum", parallel.dp.group)
        columns = zip(names, table.split(widths, dim=1), strict=True)
        shapes = {name: (num_samples, *rows[0][name].shape[1:]) for name in names}
        reduced = flow.reduce_step_values({name: column.reshape(shapes[name]) for name, column in columns})
    name = f"{type(flow).__name__}.reduce_step_values"
    if not isinstance(reduced, Mapping) or not all(isinstance(value, Tensor) for value in reduced.values()):
        raise FlowError(f"{name} must return a dictionary of tensors; return {{name: tensor}}")
    if PLACES in {PREFIX + key for key in reduced}:
        raise FlowError(f"{name} returns 'places', the name of the samples' places; rename it")
    return {PREFIX + key: value for key, value in reduced.items()}


def with_step_values(micro_batches: Sequence[MicroBatch], values: Mapping[str, Tensor]) -> list[MicroBatch]:
    """Local micro-batches whose loss inputs also contain the values and PLACES."""
    if not values:  # not the last pipeline stage
        return list(micro_batches)
    device = next(iter(values.values())).device
    return [
        replace(
            micro_batch,
            loss_inputs={
                **micro_batch.loss_inputs,
                **values,
                PLACES: torch.tensor(micro_batch.places, dtype=torch.long, device=device),
            },
        )
        for micro_batch in micro_batches
    ]


def _rows(state: TrainingState, groups: Sequence[list[MicroBatch]]) -> list[dict[str, Tensor]]:
    """What the flow's `calculate_step_values` returns for each micro-batch, on the last pipeline stage."""
    flow = state.flow
    if flow.step_values_from == "inputs":
        local = [micro_batch for group in groups for micro_batch in group] if state.parallel.is_last_stage else []
        return [flow.calculate_step_values(micro_batch.loss_inputs, None) for micro_batch in local]
    one_token = torch.ones((), dtype=torch.int)

    def rows_of(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return output.new_zeros(()), one_token, flow.calculate_step_values(micro_batch.loss_inputs, output)

    stored = [state.schedule.run(state.chunks, group, rows_of, forward_only=True) for group in groups]
    return [named for group_rows in stored for named in group_rows]


def _row(
    flow: MegatronWrapTrainingFlowBase,
    name: str,
    named: Mapping[str, Tensor],
    row_shape: Sequence[int],
    num_samples: int,
) -> Tensor:
    """[n, K], the K numbers of each sample in fp32."""
    row = named.get(name)
    if row is None or tuple(row.shape) != (num_samples, *row_shape):
        found = "is missing in one micro-batch" if row is None else f"has shape {tuple(row.shape)}"
        raise FlowError(
            f"{type(flow).__name__}.calculate_step_values: {name!r} {found}; return one row for each of the "
            f"{num_samples} samples, with the same names and shapes for every micro-batch"
        )
    return row.float().reshape(num_samples, -1)
