"""Handles steps whose loss or gradient is not finite or whose loss is a spike, and batches without a trained token.

The cause of a bad step is found by repeating it: its micro-batches are passed again one at a time, then the samples of
one of them, and all values are checked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from megatron_wrap.config.schema.run import BadStepsConfig
from megatron_wrap.engine.batches.collation import collate
from megatron_wrap.engine.batches.global_batch import PreparedBatch
from megatron_wrap.engine.batches.micro_batch import MicroBatch, pack
from megatron_wrap.engine.batches.micro_batching import names_by_index, prepared_samples
from megatron_wrap.engine.passes.loss import ModelOutput
from megatron_wrap.engine.passes.non_finite import NonFinite, NonFiniteWatch, non_finite_parameters
from megatron_wrap.engine.passes.pipeline_schedule import deferred_reduction
from megatron_wrap.engine.router_losses import reset_router_losses
from megatron_wrap.engine.state.state import OpenStep, Progress, RandomStates, TrainingState
from megatron_wrap.engine.step_inputs import (
    localized,
    loss_micro_batches,
    normalized_loss,
    replica_micro_batches,
    with_statistics,
)
from megatron_wrap.errors import TrainingError
from megatron_wrap.metrics.metric import MetricSums
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.utils.dist_logger import logger

_LISTED = 5
"""Largest number of samples of a micro-batch that a message lists."""
_SIGMA = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
_LEAST_SPREAD = 1e-3
"""Smallest robust spread of the recent losses, as a share of their median: losses that hardly differ are no measure of
a spike."""
_SKIP = "megatron_wrap.bad_steps.on_bad_step: skip leaves such steps out"
_NON_FINITE_HINT = (
    f"lower the learning rate or inspect the batch; {_SKIP}, megatron_lm.train.common.check_for_nan_in_loss_and_grad: "
    "false disables this check"
)
_SPIKE_HINT = (
    f"lower the learning rate or inspect the batch; {_SKIP}, and a larger megatron_wrap.bad_steps.spike_threshold "
    "allows this loss"
)
_WHERE_TRAINED = "megatron-wrap inspect-data shows which tokens of the data have a loss"


class BadStep(TrainingError):
    """The error of a bad step from which the run may be rolled back; the same on every rank."""

    def __init__(self, message: str, positions: Sequence[int], metrics: Mapping[str, float]) -> None:
        super().__init__(message)
        self.metrics = dict(metrics)
        """The loss and the gradient norm of the step."""
        self.positions = list(positions)
        """Positions of the step's samples in the order of the training data; empty if they are not known."""


class Spike(NamedTuple):
    """A loss far above those before it."""

    median: float
    """Median of the recent losses."""
    deviations: float
    """Distance of the loss above the median, in robust standard deviations."""


def spike(settings: BadStepsConfig, recent: Sequence[float], loss: float) -> Spike | None:
    """The spike that the loss of a step is, by `megatron_wrap.bad_steps`; None if it is none. The measure is the
    distance above the median of the recent losses, in units of 1.4826 times their median absolute deviation, at least a
    thousandth of the median.

    Args:
        recent: losses of the last steps with an update; the same on every rank.
    """
    if settings.spike_threshold is None or len(recent) < settings.spike_window or not math.isfinite(loss):
        return None
    middle = median(recent)
    spread = max(_SIGMA * median(abs(value - middle) for value in recent), _LEAST_SPREAD * abs(middle))
    deviations = (loss - middle) / spread if spread else 0.0
    return Spike(middle, deviations) if deviations > settings.spike_threshold else None


def record_loss(recent: list[float], loss: float, window: int) -> None:
    """Add the loss of a step whose update was made to the recent ones, of which `window` are kept."""
    recent.append(loss)
    del recent[:-window]


def refuse_or_skip(state: TrainingState, step: OpenStep, loss: float, grad_norm: float) -> None:
    """Find the cause of a non-finite loss or gradient, or of a spike. Then refuse the step, or count it and warn, as
    `megatron_wrap.bad_steps` defines. Collective; all ranks decide alike.

    Args:
        step: the bad step, before the update.
        loss, grad_norm: the same on every rank; at least one is not finite, or the loss is a spike.

    Raises:
        TrainingError: on every rank, with the cause; nothing has changed. BadStep: to be rolled back.
    """
    settings, in_a_row = state.config.bad_steps, state.bad_steps_in_a_row + 1
    number, values = state.progress.iteration + 1, {"loss": loss, "grad_norm": grad_norm}
    non_finite = " and ".join(name for name, value in values.items() if not math.isfinite(value))
    if non_finite:
        cause, hint = RepeatedStep(state, step).cause_of_non_finite(), _NON_FINITE_HINT
        problem = f"{non_finite} of iteration {number} not finite (loss {loss}, grad_norm {grad_norm}): {cause}"
    else:
        above, hint = spike(settings, state.progress.recent_losses, loss), _SPIKE_HINT
        assert above is not None
        problem = (
            f"loss {loss:.4g} of iteration {number} is a spike: {above.deviations:.1f} robust standard deviations "
            f"above {above.median:.4g}, the median of the last {settings.spike_window}; the largest loss is in "
            f"{RepeatedStep(state, step).sample_of_largest_loss()}"
        )
    if settings.on_bad_step == "stop":
        raise TrainingError(f"{problem}; nothing was updated; {hint}")
    if settings.on_bad_step == "rollback":
        samples = state.with_cursor(step.samples)
        positions = samples.positions if isinstance(samples, PreparedBatch) else ()
        raise BadStep(problem, positions, values)
    if in_a_row >= settings.max_in_a_row:
        raise TrainingError(
            f"{problem}; nothing was updated; it is the last of {in_a_row} such steps in a row, which end the run "
            "(megatron_wrap.bad_steps.max_in_a_row); lower the learning rate, or inspect the batches"
        )
    logger.warning_rank_0(
        f"{problem}; the step is skipped, {in_a_row} in a row (megatron_wrap.bad_steps.on_bad_step: skip)"
    )
    state.bad_steps_in_a_row = in_a_row
    state.progress.bad_steps += 1


def refuse_or_warn_untrained(steps_without_weight: int, most: int, iteration: int) -> None:
    """Warn about the first of the steps in a row that train no token; the same on every rank.

    Args:
        steps_without_weight: number of the last steps in a row that trained no token, with this one.
        most: value of `megatron_wrap.bad_steps.max_without_loss`.
        iteration: number of this step.

    Raises:
        TrainingError: there are `most`.
    """
    problem = f"no token of iteration {iteration} is trained"
    if steps_without_weight >= most:
        before, batches = (f", nor of the {most - 1} before it", "their batches") if most > 1 else ("", "its batch")
        raise TrainingError(
            f"{problem}{before}: all loss weights of {batches} are 0, or of samples without a trained token; "
            f"{_WHERE_TRAINED}; megatron_wrap.bad_steps.max_without_loss: {most} is the number of such batches in a "
            "row that ends the run"
        )
    if steps_without_weight == 1:
        logger.warning_rank_0(
            f"{problem}, so the step is skipped; {_WHERE_TRAINED}; {most} such steps in a row end the run "
            "(megatron_wrap.bad_steps.max_without_loss)"
        )


def refuse_untrained_run(progress: Progress, steps_without_weight: int) -> None:
    """At the end of a run: raise a TrainingError, on every rank, if no step has made an update and the last one trained
    no token."""
    if steps_without_weight and progress.skipped_iterations == progress.iteration:
        steps = counted(progress.iteration, "iteration")
        raise TrainingError(
            f"nothing was learned: no token of the last {counted(steps_without_weight, 'iteration')} is trained, "
            f"and none of the run's {steps} changed the weights; {_WHERE_TRAINED}"
        )


@dataclass(frozen=True)
class _Pass:
    """Values of one rank in the pass of one micro-batch."""

    number: int
    """Index of the micro-batch among those of its replica."""
    replica: int
    samples: tuple[int, ...]
    """Indices in the global batch of the micro-batch's samples."""
    non_finite: list[NonFinite]
    loss: float
    """This rank's summand of the mean loss of the first term, up to a factor."""


@dataclass(frozen=True)
class RepeatedStep:
    """A bad step that is passed again before its update, to find the cause. Parameters, buffers and random generators
    are unchanged afterwards; gradients are not."""

    state: TrainingState
    step: OpenStep

    def cause_of_non_finite(self) -> str:
        """The cause of a non-finite loss or gradient of the step, as a sentence without an end: the same on every rank.
        Collective.

        The micro-batches of the step are passed again one at a time, with the random numbers of its beginning; then the
        samples of the first one with a non-finite value are passed one at a time, by every replica.
        """
        tied = not self.state.config.arch.untie_embeddings_and_output_weights
        by_rank = gather_objects(non_finite_parameters(self.state.chunks, tied))
        names = list(dict.fromkeys(name for names in by_rank for name in names))
        if names:
            others = f" and {counted(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""
            return f"before the step, {names[0]}{others} had nan or infinite values"
        samples = self.state.with_cursor(self.step.samples)
        with self._unchanged():
            passes = self._passes_of_step(samples)
            first = min(
                ((each, value) for each in passes for value in each.non_finite),
                key=lambda pair: (pair[0].number, pair[0].replica, pair[1].part, pair[1].stage, pair[1].sequence),
                default=None,
            )
            if first is None:
                return (
                    "the step was repeated, and all values were finite, so it cannot be reproduced: faulty hardware, "
                    "or a kernel whose result depends on timing"
                )
            found, value = first
            alone = self._passes_of_samples(samples, found.samples) if len(found.samples) > 1 else [found]
        culprits = sorted({index for each in alone if each.non_finite for index in each.samples})
        return f"in {self._described(samples, passes, found, culprits)}, the first such value is {value}"

    def sample_of_largest_loss(self) -> str:
        """The micro-batch of the step with the largest mean loss, and its sample with the largest loss, as text: the
        same on every rank. Collective; see `cause_of_non_finite`."""
        samples = self.state.with_cursor(self.step.samples)
        with self._unchanged():
            passes = self._passes_of_step(samples)
            largest = _largest(passes)
            alone = _largest(self._passes_of_samples(samples, largest.samples))
        return self._described(samples, passes, largest, alone.samples)

    def _described(self, samples: Sequence[Any], passes: Sequence[_Pass], found: _Pass, culprits: Sequence[int]) -> str:
        """Describe a micro-batch of a step, and the samples that are the cause, with their origins."""
        origins = samples.origins(samples) if isinstance(samples, PreparedBatch) else ("",) * len(samples)
        count = 1 + max(each.number for each in passes)
        of_replica = f" of replica {found.replica}" if self.state.parallel.dp.size > 1 else ""

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

    def _passes_of_step(self, samples: Sequence[Any]) -> list[_Pass]:
        """The passes of all micro-batches, on all ranks. Collective."""
        sizes = self.step.weights.sizes
        if sizes:
            starts = accumulate(sizes, initial=0)
            bounds = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
            parts = [replica_micro_batches(self.state, list(samples[begin:end]), begin) for begin, end in bounds]
            groups = [
                with_statistics(localized(self.state, part.training), self.step.weights.statistics) for part in parts
            ]
        else:  # a batch with its micro-batches carries them
            groups, _ = loss_micro_batches(self.state, replica_micro_batches(self.state, samples), len(samples))
        local = [micro_batch for group in groups for micro_batch in group]
        self.state.zero_gradients()  # once: their sum may be too large for its dtype
        return _gathered(self._passed(number, micro_batch) for number, micro_batch in enumerate(local))

    def _passes_of_samples(self, samples: Sequence[Any], indices: Sequence[int]) -> list[_Pass]:
        """The passes of the samples with these indices, each in a micro-batch of its own, with the statistics of the
        step, on all ranks. Collective; every replica passes all of them."""
        statistics = self.step.weights.statistics
        if not self.step.weights.sizes and self.state.flow.step_values_from is not None:
            _, statistics = loss_micro_batches(self.state, replica_micro_batches(self.state, samples), len(samples))
        prepared = prepared_samples(self.state.prepare_sample, samples, names_by_index(samples))
        seed = self.state.config.train.seed + self.state.progress.consumed_samples

        def alone(index: int) -> MicroBatch:
            single = replace(collate(self.state.flow, [prepared(index)], seed + index), sample_indices=(index,))
            if self.state.micro_batching.packing:
                single = pack(single, self.state.micro_batching.pad_to_multiple_of)
            [local] = with_statistics(localized(self.state, [single] * self._run_size)[:1], statistics)
            self.state.zero_gradients()
            return local

        return _gathered(self._passed(number, alone(index)) for number, index in enumerate(indices))

    def _passed(self, number: int, micro_batch: MicroBatch) -> _Pass:
        """Pass a micro-batch forward and backward, alone; its gradients are added to those in the buffers. Collective
        over the replica."""
        tied = not self.state.config.arch.untie_embeddings_and_output_weights
        watch = NonFiniteWatch(self.state.chunks, tied, (self.state.parallel.pp.size, self.state.parallel.pp.rank))
        sums, weights = MetricSums(self.state.platform.device), self.step.weights
        loss = normalized_loss(self.state, weights.weights, weights.num_microbatches, sums, gradients_early=False)
        means = [0.0]

        def watched(micro_batch: MicroBatch, output: ModelOutput) -> Tensor:
            value = loss(micro_batch, output)
            watch.check_loss(value)
            weight = next(iter(micro_batch.weights.values()))
            if micro_batch.counted and weight and self.state.parallel.counts_once:
                means.append(float(value) / weight)
            return value

        local = [micro_batch, *[replace(micro_batch, counted=False)] * (self._run_size - 1)]
        share = len(local) / weights.num_microbatches
        with watch.attached(), deferred_reduction(self.state.chunks, self.state.transformer_config, share):
            self.state.pipeline_schedule.forward_backward(self.state.chunks, local, watched)
        return _Pass(number, self.state.parallel.dp.rank, micro_batch.sample_indices, watch.values, means[-1])

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Context that begins with the random generators of the beginning of the step; at its end, random generators
        and buffers have their previous values."""
        random_states = RandomStates.now(self.state.platform.device)
        buffers = [buffer for chunk in self.state.chunks for buffer in bare_model(chunk).buffers()]
        saved = [buffer.clone() for buffer in buffers]
        if self.step.random_states is not None:
            self.step.random_states.restore()
        try:
            yield
        finally:
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)
            reset_router_losses(self.state.config.arch)
            random_states.restore()

    @property
    def _run_size(self) -> int:
        """Number of micro-batches in a run of the schedule that passes one: an interleaved pipeline takes several."""
        return self.state.micro_batching.num_microbatches_multiple


def _largest(passes: Sequence[_Pass]) -> _Pass:
    """A pass of the micro-batch with the largest loss."""
    sums: dict[tuple[int, ...], float] = defaultdict(float)
    for each in passes:
        sums[each.samples] += each.loss
    return max((each for each in passes if each.samples), key=lambda each: sums[each.samples])


def _gathered(passes: Iterable[_Pass]) -> list[_Pass]:
    """The passes of all ranks. Collective."""
    return [each for of_rank in gather_objects(list(passes)) for each in of_rank]
