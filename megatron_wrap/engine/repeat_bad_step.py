"""The cause of a bad step: it is repeated once, to check all its values or to compare the losses of its samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch, collate
from megatron_wrap.engine.batches.micro_batching import names_by_index, prepared_samples
from megatron_wrap.engine.batches.packed_rows import pack
from megatron_wrap.engine.batches.prepared_batch import PreparedBatch
from megatron_wrap.engine.passes.deferred_reduction import deferred_reduction
from megatron_wrap.engine.passes.non_finite import NonFinite, NonFiniteWatch, non_finite_parameters
from megatron_wrap.engine.router_losses import reset_router_losses
from megatron_wrap.engine.state.open_step import OpenStep
from megatron_wrap.engine.state.random_states import RandomStates
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.engine.step_inputs import (
    equal_runs,
    local_groups,
    localized,
    loss_micro_batches,
    normalized_loss,
    replica_micro_batches,
)
from megatron_wrap.engine.step_statistics import with_statistics
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.parallel.collectives import gather_objects

Key = TypeVar("Key")
_LISTED = 5
"""Samples of a micro-batch that are listed."""


@dataclass(frozen=True)
class _Located:
    """The first non-finite value of a pass, over all ranks."""

    value: NonFinite
    replica: int
    num_microbatches: int
    """Of a replica."""
    samples: tuple[int, ...]
    """Indices in the global batch of the micro-batch's samples."""

    @property
    def order(self) -> tuple[int, ...]:
        """By micro-batch, replica and part of the pass; then as the values were computed."""
        value = self.value
        return value.micro_batch, self.replica, value.part, value.stage, value.sequence


def cause_of_non_finite(state: TrainingState, step: OpenStep) -> str:
    """What made the loss or the gradient of a step non-finite, as a sentence without an end: the same on every rank.
    Collective.

    The step is repeated with the random numbers of its beginning, on every rank with the same micro-batches; then the
    samples of the first micro-batch with a non-finite value are passed one at a time, by every replica. Parameters,
    buffers and random generators are unchanged; gradients are not.

    Args:
        step: its parameters are not updated yet.
    """
    tied = not state.config.arch.untie_embeddings_and_output_weights
    by_rank = gather_objects(non_finite_parameters(state.chunks, tied))
    names = list(dict.fromkeys(name for names in by_rank for name in names))
    if names:
        others = f" and {counted(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""
        return f"before the step, {names[0]}{others} had nan or infinite values"
    samples = state.with_cursor(step.samples)
    with _unchanged(state, step):
        first = _first_of_step(state, step, samples)
        if first is None:
            return (
                "the step was repeated, and all values were finite, so it cannot be reproduced: faulty hardware, or a "
                "kernel whose result depends on timing"
            )
        culprits = first.samples if len(first.samples) == 1 else _alone(state, step, samples, first.samples)
    micro_batch = _micro_batch(state, first.value.micro_batch, first.num_microbatches, first.replica)
    return f"in {micro_batch}, {_described(samples, first.samples, culprits)}, the first such value is {first.value}"


def sample_of_largest_loss(state: TrainingState, step: OpenStep) -> str:
    """The micro-batch of a step with the largest mean loss, and in it the sample with the largest one, in words: the
    same on every rank. Collective.

    Args:
        step: its parameters are not updated yet.
    """
    samples, parallel = state.with_cursor(step.samples), state.parallel
    with _unchanged(state, step):
        groups = _groups(state, step, samples)
        losses = [loss for group in groups for loss in _mean_losses(state, step, group)]
        sums = _summed(state, [((number, parallel.dp.rank), loss) for number, loss in enumerate(losses)])
        indices = [micro_batch.sample_indices for group in groups for micro_batch in group]
        of_replicas = dict(gather_objects((parallel.dp.rank, indices)))
        number, replica = max(sums, key=lambda key: (bool(of_replicas[key[1]][key[0]]), sums[key]))
        members = of_replicas[replica][number]
        sample = _largest_alone(state, step, samples, members)
    name = _micro_batch(state, number, len(indices), replica)
    return f"{name}, {_described(samples, members, (sample,))}"


def _mean_losses(state: TrainingState, step: OpenStep, local: list[MicroBatch]) -> list[float]:
    """The loss of each micro-batch per weight of its first term, up to a factor, this context-parallel rank's share; on
    the last pipeline stage, else []. Collective over the replica."""
    loss = normalized_loss(
        state, step.weights.weights, step.weights.num_microbatches, MetricSums(state.platform.device)
    )

    def mean(micro_batch: MicroBatch, output: Tensor) -> float:
        weight = next(iter(micro_batch.weights.values()))
        return float(loss(micro_batch, output)) / weight if micro_batch.counted and weight else 0.0

    return state.pipeline_schedule.forward(state.chunks, local, mean)


def _largest_alone(state: TrainingState, step: OpenStep, samples: Sequence[Any], indices: Sequence[int]) -> int:
    """The index of the sample with the largest loss in a micro-batch of its own. Collective."""
    if len(indices) == 1:
        return indices[0]
    losses: list[tuple[int, float]] = []
    for run, local in _runs_of_one(state, step, samples, indices):
        losses += zip([mb.sample_indices[0] for mb in run], _mean_losses(state, step, local), strict=False)
    sums = _summed(state, losses)
    return max(sums, key=lambda index: sums[index])


def _summed(state: TrainingState, losses: list[tuple[Key, float]]) -> dict[Key, float]:
    """Losses by key, summed over all context-parallel ranks, and those of equal keys over all replicas. Collective."""
    sums: dict[Key, float] = defaultdict(float)
    for of_rank in gather_objects(losses if state.parallel.counts_once else []):
        for key, value in of_rank:
            sums[key] += value
    return sums


def _micro_batch(state: TrainingState, number: int, count: int, replica: int) -> str:
    of_replica = f" of replica {replica}" if state.parallel.dp.size > 1 else ""
    return f"micro-batch {number} of {count}{of_replica}"


def _described(samples: Sequence[Any], of_micro_batch: tuple[int, ...], culprits: tuple[int, ...]) -> str:
    """The samples that cause it, with their origins."""
    origins = samples.origins(samples) if isinstance(samples, PreparedBatch) else ("",) * len(samples)

    def described(index: int) -> str:
        origin = origins[index]
        return f"{index} of a batch of {len(samples)}" + (f" ({origin})" if origin else "")

    if culprits:
        further = f" and {counted(len(culprits) - 1, 'other')}" if len(culprits) > 1 else ""
        return f"sample {described(culprits[0])}{further}"
    listed = ", ".join(described(index) for index in of_micro_batch[:_LISTED])
    rest = ", ..." if len(of_micro_batch) > _LISTED else ""
    return f"no sample alone, but together samples {listed}{rest}"


def _groups(state: TrainingState, step: OpenStep, samples: Sequence[Any]) -> list[list[MicroBatch]]:
    """This process's micro-batches of each part of the step, as the loss takes them. Collective."""
    sizes = step.weights.sizes
    if not sizes:  # a batch with its micro-batches carries them
        return loss_micro_batches(state, replica_micro_batches(state, samples), len(samples))
    starts = accumulate(sizes, initial=0)
    bounds = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    parts = [replica_micro_batches(state, list(samples[begin:end]), begin) for begin, end in bounds]
    return [with_statistics(localized(state, part.training), step.weights.statistics) for part in parts]


def _first_of_step(state: TrainingState, step: OpenStep, samples: Sequence[Any]) -> _Located | None:
    """Repeat all micro-batches. Collective."""
    groups = _groups(state, step, samples)
    count, before, located = sum(map(len, groups)), 0, []
    for group in groups:
        for value in _values(state, step, group):
            moved = replace(value, micro_batch=before + value.micro_batch)
            of_micro_batch = group[value.micro_batch].sample_indices
            located.append(_Located(moved, state.parallel.dp.rank, count, of_micro_batch))
        before += len(group)
    everywhere = [value for of_rank in gather_objects(located) for value in of_rank]
    return min(everywhere, key=lambda value: value.order, default=None)


def _alone(state: TrainingState, step: OpenStep, samples: Sequence[Any], indices: Sequence[int]) -> tuple[int, ...]:
    """Those of the samples with these indices that have a non-finite value in a micro-batch of their own. Collective;
    every replica passes all of them."""
    culprits: set[int] = set()
    for run, local in _runs_of_one(state, step, samples, indices):
        for value in _values(state, step, local):
            culprits.update(run[value.micro_batch].sample_indices)
    return tuple(sorted(set().union(*gather_objects(culprits))))


def _runs_of_one(
    state: TrainingState, step: OpenStep, samples: Sequence[Any], indices: Sequence[int]
) -> Iterator[tuple[Sequence[MicroBatch], list[MicroBatch]]]:
    """Runs of the schedule over the samples with these indices, each in a micro-batch of its own, and the same on the
    device, with the statistics of the step. Collective."""
    statistics = _statistics(state, step, samples)
    for run in equal_runs(state, _single(state, samples, indices)):
        yield run, with_statistics(localized(state, run), statistics)


def _single(state: TrainingState, samples: Sequence[Any], indices: Sequence[int]) -> list[MicroBatch]:
    """A micro-batch of each of the samples with these indices, before padding and splitting. No communication."""
    prepared = prepared_samples(state.prepare_sample, samples, names_by_index(samples))
    seed = state.config.train.seed + state.progress.consumed_samples
    single = [
        replace(collate(state.flow, [prepared(index)], seed + index), sample_indices=(index,)) for index in indices
    ]
    if state.micro_batching.packing:
        single = [pack(micro_batch, state.micro_batching.pad_to_multiple_of) for micro_batch in single]
    return single


def _statistics(state: TrainingState, step: OpenStep, samples: Sequence[Any]) -> Mapping[str, Tensor]:
    """Statistics of the whole step. Collective."""
    if step.weights.sizes or state.flow.step_values_from is None:
        return step.weights.statistics
    return local_groups(state, replica_micro_batches(state, samples), len(samples))[1]


def _values(state: TrainingState, step: OpenStep, local: list[MicroBatch]) -> list[NonFinite]:
    """Pass micro-batches forward and backward; this rank's non-finite values. Collective over the replica."""
    state.zero_gradients()
    tied = not state.config.arch.untie_embeddings_and_output_weights
    watch = NonFiniteWatch(state.chunks, tied, (state.parallel.pp.size, state.parallel.pp.rank))
    sums = MetricSums(state.platform.device)
    loss = normalized_loss(state, step.weights.weights, step.weights.num_microbatches, sums, gradients_early=False)
    share = len(local) / step.weights.num_microbatches
    with watch.attached(), deferred_reduction(state.chunks, state.transformer_config, share):
        state.pipeline_schedule.forward_backward(state.chunks, local, watch.watched(loss, local))
    return watch.values


@contextmanager
def _unchanged(state: TrainingState, step: OpenStep) -> Iterator[None]:
    """Random generators as at the beginning of the step; these and the buffers as before at the end."""
    random_states = RandomStates.now(state.platform.device)
    buffers = [buffer for chunk in state.chunks for buffer in bare_model(chunk).buffers()]
    saved = [buffer.clone() for buffer in buffers]
    if step.random_states is not None:
        step.random_states.restore()
    try:
        yield
    finally:
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)
        reset_router_losses(state.config.arch)
        random_states.restore()
