"""Converts a global batch to the micro-batches of this process, with everything that the loss needs besides the
policy's output: outputs of the reference model, and statistics of the whole step, which are the same on each layout.
A step, a part of a step and an evaluation all begin here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.batches.global_batch import PreparedBatch, batch_key
from megatron_wrap.engine.batches.micro_batch import NOISE, MicroBatch, ReplicaMicroBatches
from megatron_wrap.engine.batches.micro_batching import MicroBatching, names_by_index, prepared_samples, split_batch
from megatron_wrap.engine.passes.loss import NormalizedLoss
from megatron_wrap.engine.passes.reference_model import with_reference_outputs
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.base import STEP_PREFIX
from megatron_wrap.flow.contract.routing import ROUTED_EXPERTS, RoutingShape
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.phases import DATA, phase
from megatron_wrap.model.random_numbers import key_of
from megatron_wrap.parallel.collectives import broadcast_on, gather_objects, reduce_in_place
from megatron_wrap.parallel.state import Axis, ParallelState


def replica_micro_batches(state: TrainingState, batch: Sequence[Any], start: int = 0) -> ReplicaMicroBatches:
    """This replica's micro-batches of a batch of the step: those that the batch carries if they belong to this step,
    else newly prepared ones. No communication.

    Args:
        batch: the global batch, or a part of it.
        start: index of its first sample in the global batch.
    """
    seed = state.config.train.seed + state.progress.consumed_samples + start
    if isinstance(batch, PreparedBatch):
        carried = batch.micro_batches(batch_key(state.micro_batching, seed, state.parallel.dp))
        if carried is not None:
            refuse_without_routing(state.flow.context.routing, carried.training, ("R2", "R3"))
            return carried
    with phase(DATA):
        micro_batches = split(state.flow, state.prepare_sample, batch, state.micro_batching, seed, state.parallel.dp)
    refuse_without_routing(state.flow.context.routing, micro_batches.training, ("R2", "R3"))
    if not start:
        return micro_batches
    moved = [
        replace(micro_batch, sample_indices=tuple(start + index for index in micro_batch.sample_indices))
        for micro_batch in micro_batches.training
    ]
    return ReplicaMicroBatches(tuple(moved), micro_batches.statistics)


def split(
    flow: MegatronWrapTrainingFlowBase,
    prepare_sample: Callable[[Any], Any],
    batch: Sequence[Any],
    micro_batching: MicroBatching,
    seed: int,
    dp: Axis,
    name_of: Callable[[int], str] | None = None,
) -> ReplicaMicroBatches:
    """`split_batch` for samples as they were read; without `name_of`, messages name them by their index."""
    name_of = name_of or names_by_index(batch)
    prepared = prepared_samples(prepare_sample, batch, name_of)
    return split_batch(flow, len(batch), prepared, micro_batching, seed, dp, name_of)


def loss_micro_batches(
    state: TrainingState, micro_batches: ReplicaMicroBatches, num_samples: int, equal_rows: bool = False
) -> tuple[list[list[MicroBatch]], dict[str, Tensor]]:
    """This process's part of the micro-batches as the loss takes them: with the outputs of the reference model and the
    statistics of the whole step. Collective.

    Args:
        num_samples: samples of the global batch, over all replicas.
        equal_rows: form runs of the schedule with the same number of rows, as `equal_runs` does; False: one run.

    Returns:
        The micro-batches of each run of the schedule; the statistics, which they contain.
    """
    multiple = state.micro_batching.num_microbatches_multiple

    def runs(of_replica: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        one_run = [of_replica] if of_replica else []
        return [localized(state, run) for run in (equal_runs(of_replica, multiple) if equal_rows else one_run)]

    groups = runs(micro_batches.training)
    if state.flow.step_values_from is None:
        return groups, {}
    sources = runs(micro_batches.statistics) or groups
    statistics = step_statistics(state, micro_batches.training, sources, num_samples)
    return [with_statistics(group, statistics) for group in groups], statistics


def normalized_loss(
    state: TrainingState,
    step_weights: Mapping[str, float],
    num_microbatches: int,
    sums: MetricSums,
    gradients_early: bool = True,
) -> NormalizedLoss:
    """The loss function of a step or an evaluation; arguments as the fields of `NormalizedLoss`.

    Args:
        gradients_early: the gradients of deferred logits may be computed in the forward pass.
    """
    return NormalizedLoss(
        flow=state.flow,
        calculate_loss=state.calculate_loss,
        cp_size=state.parallel.cp.size,
        dp_size=state.parallel.dp.size,
        step_weights=step_weights,
        num_microbatches=num_microbatches,
        sums=sums,
        factor_is_known=gradients_early and not state.config.dtype.fp16,
    )


def refuse_without_routing(
    routing: RoutingShape | None, micro_batches: Sequence[MicroBatch], modes: Sequence[str]
) -> None:
    """Raise a DataError if `router_replay` is one of `modes` and samples contain no routing.

    Args:
        routing: of the flow's context; None without `router_replay`.
    """
    if routing is None or routing.mode not in modes:
        return
    if all(ROUTED_EXPERTS in micro_batch.model_inputs for micro_batch in micro_batches):
        return
    origin = "wrap.forward returns it" if routing.mode == "R2" else "the rollout engine returns it"
    raise DataError(
        f'the samples contain no "{ROUTED_EXPERTS}", which megatron_lm.train.common.router_replay: {routing.mode} '
        f"needs; add it to each sample ({origin}), or set router_replay to disabled"
    )


def localized(state: TrainingState, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """This process's part of micro-batches, with the reference model's outputs. Collective."""
    local = state.localization.localize(micro_batches, state.extra_padding)
    if state.config.train.neftune_noise_alpha is not None:
        key = key_of(state.config.train.seed, f"embedding noise {state.progress.iteration}")
        local = [_with_noise(micro_batch, key) for micro_batch in local]
    if state.reference is None:
        return local
    return with_reference_outputs(state.reference, state.flow, state.pipeline_schedule, local)


def _with_noise(micro_batch: MicroBatch, step_key: int) -> MicroBatch:
    """The micro-batch with the noise of the step."""
    noise = replace(micro_batch.model_inputs[NOISE], step_key=step_key)
    return replace(micro_batch, model_inputs={**micro_batch.model_inputs, NOISE: noise})


def equal_runs(micro_batches: Sequence[MicroBatch], multiple: int) -> Iterator[list[MicroBatch]]:
    """The micro-batches in runs of the schedule with the same number of rows; fillers, which are not counted, complete
    a run to the multiple that an interleaved pipeline takes."""
    for _, same_size in groupby(micro_batches, key=lambda micro_batch: micro_batch.num_rows):
        run = list(same_size)
        run += [replace(run[-1], counted=False)] * (-len(run) % multiple)
        yield run


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
    values = _reduced_facts(flow, training, num_samples, parallel)
    with state.evaluation_mode():
        if flow.step_values_from == "inputs":
            local = [micro_batch for group in groups for micro_batch in group] if parallel.is_last_stage else []
            rows = [flow.calculate_step_values(micro_batch.loss_inputs, None) for micro_batch in local]
        else:
            rows = [
                row
                for group in groups
                for row in state.pipeline_schedule.forward(
                    state.chunks,
                    list(group),
                    lambda micro_batch, output: flow.calculate_step_values(micro_batch.loss_inputs, output),
                )
            ]
        if not parallel.is_last_stage:
            return {}
        values = _gathered_rows(flow, groups, rows, num_samples, parallel, device) | {
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


def _reduced_facts(
    flow: MegatronWrapTrainingFlowBase, training: Sequence[MicroBatch], num_samples: int, parallel: ParallelState
) -> dict[str, Tensor]:
    """The flow's `reduce_sample_facts` of all samples of the global batch, the same on every rank. Collective over
    replicas."""
    if type(flow).get_sample_facts is MegatronWrapTrainingFlowBase.get_sample_facts:
        return {}
    by_index: dict[int, object] = {}
    for micro_batch in training:
        by_index.update(zip(micro_batch.sample_indices, micro_batch.sample_facts, strict=True))
    if parallel.dp.size > 1:
        for of_replica in gather_objects(by_index, parallel.dp_on_host):
            by_index |= of_replica
    return flow.reduce_sample_facts([by_index[index] for index in range(num_samples)])


def _gathered_rows(
    flow: MegatronWrapTrainingFlowBase,
    groups: Sequence[Sequence[MicroBatch]],
    rows: Sequence[Mapping[str, Tensor]],
    num_samples: int,
    parallel: ParallelState,
    device: torch.device,
) -> dict[str, Tensor]:
    """Name -> the rows of all samples of the global batch, [N] or [N, K] in fp32, bit for bit the same on all ranks, so
    that a sort of close values is as well. Collective over the last pipeline stage."""
    names = sorted(rows[0])
    if not names:  # a flow of facts alone
        return {}
    shapes = {name: rows[0][name].shape[1:] for name in names}
    widths = [shape.numel() for shape in shapes.values()]
    table = torch.zeros(num_samples, sum(widths), device=device)
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
