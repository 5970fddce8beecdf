"""Finds the cause of a bad step: its micro-batches are passed again one at a time, then the samples of one of them, and
all values are checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from megatron_wrap.engine.batches.collation import collate
from megatron_wrap.engine.batches.global_batch import PreparedBatch
from megatron_wrap.engine.batches.micro_batch import MicroBatch, pack
from megatron_wrap.engine.batches.micro_batching import names_by_index, prepared_samples
from megatron_wrap.engine.passes.loss import ModelOutput
from megatron_wrap.engine.passes.non_finite import NonFinite, NonFiniteWatch, non_finite_parameters
from megatron_wrap.engine.passes.pipeline_schedule import deferred_reduction
from megatron_wrap.engine.router_losses import reset_router_losses
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.engine.state.step_state import OpenStep, RandomStates
from megatron_wrap.engine.step_inputs import (
    local_groups,
    localized,
    loss_micro_batches,
    normalized_loss,
    replica_micro_batches,
    with_statistics,
)
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.parallel.collectives import gather_objects

_LISTED = 5
"""Largest number of samples of a micro-batch that a message lists."""


@dataclass(frozen=True)
class _Pass:
    """Values that one rank found in the pass of one micro-batch."""

    number: int
    """Index of the micro-batch among those of its replica."""
    replica: int
    samples: tuple[int, ...]
    """Indices in the global batch of the micro-batch's samples."""
    non_finite: list[NonFinite]
    loss: float
    """This rank's summand of the mean loss of the first term, up to a factor."""


def cause_of_non_finite(state: TrainingState, step: OpenStep) -> str:
    """The cause of a non-finite loss or gradient of a step, as a sentence without an end: the same on every rank.
    Collective.

    The micro-batches of the step are passed again one at a time, with the random numbers of its beginning; then the
    samples of the first one with a non-finite value are passed one at a time, by every replica. Parameters, buffers and
    random generators are unchanged; gradients are not.

    Args:
        step: the bad step, before the update.
    """
    tied = not state.config.arch.untie_embeddings_and_output_weights
    by_rank = gather_objects(non_finite_parameters(state.chunks, tied))
    names = list(dict.fromkeys(name for names in by_rank for name in names))
    if names:
        others = f" and {counted(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""
        return f"before the step, {names[0]}{others} had nan or infinite values"
    samples = state.with_cursor(step.samples)
    with _unchanged(state, step):
        passes = _passes_of_step(state, step, samples)
        first = min(
            ((each, value) for each in passes for value in each.non_finite),
            key=lambda pair: (pair[0].number, pair[0].replica, pair[1].part, pair[1].stage, pair[1].sequence),
            default=None,
        )
        if first is None:
            return (
                "the step was repeated, and all values were finite, so it cannot be reproduced: faulty hardware, or a "
                "kernel whose result depends on timing"
            )
        found, value = first
        alone = _passes_of_samples(state, step, samples, found.samples) if len(found.samples) > 1 else [found]
    culprits = sorted({index for each in alone if each.non_finite for index in each.samples})
    return f"in {_described(state, samples, passes, found, culprits)}, the first such value is {value}"


def sample_of_largest_loss(state: TrainingState, step: OpenStep) -> str:
    """The micro-batch of a step with the largest mean loss, and its sample with the largest loss, as text: the same on
    every rank. Collective; see `cause_of_non_finite`."""
    samples = state.with_cursor(step.samples)
    with _unchanged(state, step):
        passes = _passes_of_step(state, step, samples)
        largest = _largest(passes)
        alone = _largest(_passes_of_samples(state, step, samples, largest.samples))
    return _described(state, samples, passes, largest, alone.samples)


def _largest(passes: Sequence[_Pass]) -> _Pass:
    """A pass of the micro-batch with the largest loss."""
    sums: dict[tuple[int, ...], float] = defaultdict(float)
    for each in passes:
        sums[each.samples] += each.loss
    return max((each for each in passes if each.samples), key=lambda each: sums[each.samples])


def _described(
    state: TrainingState, samples: Sequence[Any], passes: Sequence[_Pass], found: _Pass, culprits: Sequence[int]
) -> str:
    """Describe a micro-batch of a step, and the samples that are the cause, with their origins."""
    origins = samples.origins(samples) if isinstance(samples, PreparedBatch) else ("",) * len(samples)
    count = 1 + max(each.number for each in passes)
    of_replica = f" of replica {found.replica}" if state.parallel.dp.size > 1 else ""

    def described(index: int) -> str:
        origin = origins[index]
        return f"{index} of a batch of {len(samples)}" + (f" ({origin})" if origin else "")

    if culprits:
        further = f" and {counted(len(culprits) - 1, 'other')}" if len(culprits) > 1 else ""
        members = f"sample {described(culprits[0])}{further}"
    else:
        listed = ", ".join(described(index) for index in found.samples[:_LISTED])
        members = f"no sample alone, but together samples {listed}{', ...' if len(found.samples) > _LISTED else ''}"
    return f"micro-batch {found.number} of {count}{of_replica}, {members}"


def _passes_of_step(state: TrainingState, step: OpenStep, samples: Sequence[Any]) -> list[_Pass]:
    """The passes of all micro-batches, on all ranks. Collective."""
    sizes = step.weights.sizes
    if sizes:
        starts = accumulate(sizes, initial=0)
        bounds = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        parts = [replica_micro_batches(state, list(samples[begin:end]), begin) for begin, end in bounds]
        groups = [with_statistics(localized(state, part.training), step.weights.statistics) for part in parts]
    else:  # a batch with its micro-batches carries them
        groups = loss_micro_batches(state, replica_micro_batches(state, samples), len(samples))
    local = [micro_batch for group in groups for micro_batch in group]
    state.zero_gradients()  # once: their sum may be too large for its dtype
    return _gathered(_passed(state, step, number, micro_batch) for number, micro_batch in enumerate(local))


def _passes_of_samples(
    state: TrainingState, step: OpenStep, samples: Sequence[Any], indices: Sequence[int]
) -> list[_Pass]:
    """The passes of the samples with these indices, each in a micro-batch of its own, with the statistics of the step,
    on all ranks. Collective; every replica passes all of them."""
    statistics = step.weights.statistics
    if not step.weights.sizes and state.flow.step_values_from is not None:
        statistics = local_groups(state, replica_micro_batches(state, samples), len(samples))[1]
    prepared = prepared_samples(state.prepare_sample, samples, names_by_index(samples))
    seed = state.config.train.seed + state.progress.consumed_samples

    def alone(index: int) -> MicroBatch:
        single = replace(collate(state.flow, [prepared(index)], seed + index), sample_indices=(index,))
        if state.micro_batching.packing:
            single = pack(single, state.micro_batching.pad_to_multiple_of)
        [local] = with_statistics(localized(state, [single] * _fillers(state))[:1], statistics)
        state.zero_gradients()
        return local

    return _gathered(_passed(state, step, number, alone(index)) for number, index in enumerate(indices))


def _fillers(state: TrainingState) -> int:
    """Number of micro-batches in a run of the schedule that passes one: an interleaved pipeline takes several."""
    return state.micro_batching.num_microbatches_multiple


def _gathered(passes: Iterable[_Pass]) -> list[_Pass]:
    """The passes of all ranks. Collective."""
    return [each for of_rank in gather_objects(list(passes)) for each in of_rank]


def _passed(state: TrainingState, step: OpenStep, number: int, micro_batch: MicroBatch) -> _Pass:
    """Pass a micro-batch forward and backward, alone; its gradients are added to those in the buffers. Collective over
    the replica."""
    tied = not state.config.arch.untie_embeddings_and_output_weights
    watch = NonFiniteWatch(state.chunks, tied, (state.parallel.pp.size, state.parallel.pp.rank))
    sums, weights = MetricSums(state.platform.device), step.weights
    loss = normalized_loss(state, weights.weights, weights.num_microbatches, sums, gradients_early=False)
    means = [0.0]

    def watched(micro_batch: MicroBatch, output: ModelOutput) -> Tensor:
        value = loss(micro_batch, output)
        watch.check_loss(value)
        weight = next(iter(micro_batch.weights.values()))
        if micro_batch.counted and weight and state.parallel.counts_once:
            means.append(float(value) / weight)
        return value

    local = [micro_batch, *[replace(micro_batch, counted=False)] * (_fillers(state) - 1)]
    share = len(local) / weights.num_microbatches
    with watch.attached(), deferred_reduction(state.chunks, state.transformer_config, share):
        state.pipeline_schedule.forward_backward(state.chunks, local, watched)
    return _Pass(number, state.parallel.dp.rank, micro_batch.sample_indices, watch.values, means[-1])


@contextmanager
def _unchanged(state: TrainingState, step: OpenStep) -> Iterator[None]:
    """Context that begins with the random generators of the beginning of the step; at its end, random generators and
    buffers have their previous values."""
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
