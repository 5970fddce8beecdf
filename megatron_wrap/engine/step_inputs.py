"""Converts a global batch to the micro-batches of this process, with everything that the loss needs besides the
policy's output. A step, a part of a step and an evaluation all begin here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import Tensor

from megatron_wrap.engine.batches.context_parallel_shard import NOISE
from megatron_wrap.engine.batches.micro_batch import MicroBatch, ReplicaMicroBatches
from megatron_wrap.engine.batches.micro_batching import MicroBatching, names_by_index, prepared_samples, split_batch
from megatron_wrap.engine.batches.prepared_batch import PreparedBatch, batch_key
from megatron_wrap.engine.passes.loss import NormalizedLoss
from megatron_wrap.engine.reference.reference_model import with_reference_outputs
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.engine.step_statistics import step_statistics, with_statistics
from megatron_wrap.errors import DataError
from megatron_wrap.flow.contract.routing import ROUTED_EXPERTS
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.phases import DATA, phase
from megatron_wrap.model.random_numbers import key_of


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
            refuse_without_routing(state, carried.training, ("R2", "R3"))
            return carried
    with phase(DATA):
        micro_batches = split(state, batch, state.micro_batching, seed)
    refuse_without_routing(state, micro_batches.training, ("R2", "R3"))
    if not start:
        return micro_batches
    moved = [
        replace(micro_batch, sample_indices=tuple(start + index for index in micro_batch.sample_indices))
        for micro_batch in micro_batches.training
    ]
    return ReplicaMicroBatches(tuple(moved), micro_batches.statistics)


def split(
    state: TrainingState,
    batch: Sequence[Any],
    micro_batching: MicroBatching,
    seed: int,
    name_of: Callable[[int], str] | None = None,
) -> ReplicaMicroBatches:
    """`split_batch` for samples as they were read; without `name_of`, messages name them by their index."""
    name_of = name_of or names_by_index(batch)
    prepared = prepared_samples(state.prepare_sample, batch, name_of)
    return split_batch(state.flow, len(batch), prepared, micro_batching, seed, state.parallel.dp, name_of)


def loss_micro_batches(
    state: TrainingState, micro_batches: ReplicaMicroBatches, num_samples: int, equal_rows: bool = False
) -> list[list[MicroBatch]]:
    """This process's part of the micro-batches as the loss takes them: with the outputs of the reference model and the
    statistics of the whole step. Collective.

    Args:
        num_samples: samples of the global batch, over all replicas.
        equal_rows: form runs of the schedule with the same number of rows, as `equal_runs` does; False: one run.

    Returns:
        The micro-batches of each run of the schedule.
    """
    groups, statistics = local_groups(state, micro_batches, num_samples, equal_rows)
    return [with_statistics(group, statistics) for group in groups]


def local_groups(
    state: TrainingState, micro_batches: ReplicaMicroBatches, num_samples: int, equal_rows: bool = False
) -> tuple[list[list[MicroBatch]], dict[str, Tensor]]:
    """The micro-batches of `loss_micro_batches` before they get the statistics of the whole step, and these statistics.
    Arguments as of `loss_micro_batches`. Collective."""

    def runs(of_replica: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        one_run = [of_replica] if of_replica else []
        return [localized(state, run) for run in (equal_runs(state, of_replica) if equal_rows else one_run)]

    groups = runs(micro_batches.training)
    if state.flow.step_values_from is None:
        return groups, {}
    sources = runs(micro_batches.statistics) or groups
    return groups, step_statistics(state, micro_batches.training, sources, num_samples)


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


def refuse_without_routing(state: TrainingState, micro_batches: Sequence[MicroBatch], modes: Sequence[str]) -> None:
    """Raise a DataError if `router_replay` is one of `modes` and samples contain no routing."""
    routing = state.flow.context.routing
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
        local = [_with_noise_of_step(state, micro_batch) for micro_batch in local]
    if state.reference is None:
        return local
    return with_reference_outputs(state.reference, state.flow, state.pipeline_schedule, local)


def _with_noise_of_step(state: TrainingState, micro_batch: MicroBatch) -> MicroBatch:
    key = key_of(state.config.train.seed, f"embedding noise {state.progress.iteration}")
    noise = replace(micro_batch.model_inputs[NOISE], step_key=key)
    return replace(micro_batch, model_inputs={**micro_batch.model_inputs, NOISE: noise})


def equal_runs(state: TrainingState, micro_batches: Sequence[MicroBatch]) -> Iterator[list[MicroBatch]]:
    """The micro-batches in runs of the schedule with the same number of rows; fillers, which are not counted, complete
    a run to the multiple that an interleaved pipeline takes."""
    multiple = state.micro_batching.num_microbatches_multiple
    for _, same_size in groupby(micro_batches, key=lambda micro_batch: micro_batch.num_rows):
        run = list(same_size)
        run += [replace(run[-1], counted=False)] * (-len(run) % multiple)
        yield run
