"""Handles steps whose loss or gradient is not finite or whose loss is a spike, and batches without a trained token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megatron_wrap.engine.batches.global_batch import PreparedBatch
from megatron_wrap.engine.repeat_bad_step import cause_of_non_finite, sample_of_largest_loss
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.engine.state.step_state import OpenStep
from megatron_wrap.errors import TrainingError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.utils.dist_logger import logger

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


def spike(state: TrainingState, loss: float) -> Spike | None:
    """The spike that the loss of a step is, by `megatron_wrap.bad_steps`; None if it is none. The measure is the
    distance above the median of the recent losses, in units of 1.4826 times their median absolute deviation, at least a
    thousandth of the median. The same on every rank."""
    settings, recent = state.config.bad_steps, state.progress.recent_losses
    if settings.spike_threshold is None or len(recent) < settings.spike_window or not math.isfinite(loss):
        return None
    middle = median(recent)
    spread = max(_SIGMA * median(abs(value - middle) for value in recent), _LEAST_SPREAD * abs(middle))
    deviations = (loss - middle) / spread if spread else 0.0
    return Spike(middle, deviations) if deviations > settings.spike_threshold else None


def record_good_step(state: TrainingState, loss: float) -> None:
    """Record the loss of a step whose update was made, and end the row of bad steps."""
    state.bad_steps_in_a_row = 0
    settings, recent = state.config.bad_steps, state.progress.recent_losses
    if settings.spike_threshold is not None:
        recent.append(loss)
        del recent[: -settings.spike_window]


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
    problem, hint = _problem(state, step, loss, grad_norm)
    if settings.on_bad_step == "stop":
        raise TrainingError(f"{problem}; nothing was updated; {hint}")
    if settings.on_bad_step == "rollback":
        samples = state.with_cursor(step.samples)
        positions = samples.positions if isinstance(samples, PreparedBatch) else ()
        raise BadStep(problem, positions, {"loss": loss, "grad_norm": grad_norm})
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


def _problem(state: TrainingState, step: OpenStep, loss: float, grad_norm: float) -> tuple[str, str]:
    """The problem of the step with its cause, and the advice, as texts. Collective."""
    number, values = state.progress.iteration + 1, {"loss": loss, "grad_norm": grad_norm}
    non_finite = " and ".join(name for name, value in values.items() if not math.isfinite(value))
    if non_finite:
        cause = cause_of_non_finite(state, step)
        problem = f"{non_finite} of iteration {number} not finite (loss {loss}, grad_norm {grad_norm}): {cause}"
        return problem, _NON_FINITE_HINT
    above = spike(state, loss)
    assert above is not None
    return (
        f"loss {loss:.4g} of iteration {number} is a spike: {above.deviations:.1f} robust standard deviations above "
        f"{above.median:.4g}, the median of the last {state.config.bad_steps.spike_window}; the largest loss is in "
        f"{sample_of_largest_loss(state, step)}",
        _SPIKE_HINT,
    )


def skip_or_refuse_untrained(state: TrainingState, is_trained: bool) -> None:
    """Count the steps in a row that train no token, and warn about the first; the same on every rank.

    Raises:
        TrainingError: there are `max_without_loss`.
    """
    state.steps_without_weight = 0 if is_trained else state.steps_without_weight + 1
    if is_trained:
        return
    most = state.config.bad_steps.max_without_loss
    problem = f"no token of iteration {state.progress.iteration + 1} is trained"
    if state.steps_without_weight >= most:
        before, batches = (f", nor of the {most - 1} before it", "their batches") if most > 1 else ("", "its batch")
        raise TrainingError(
            f"{problem}{before}: all loss weights of {batches} are 0, or of samples without a trained token; "
            f"{_WHERE_TRAINED}; megatron_wrap.bad_steps.max_without_loss: {most} is the number of such batches in a "
            "row that ends the run"
        )
    if state.steps_without_weight == 1:
        logger.warning_rank_0(
            f"{problem}, so the step is skipped; {_WHERE_TRAINED}; {most} such steps in a row end the run "
            "(megatron_wrap.bad_steps.max_without_loss)"
        )


def refuse_untrained_run(state: TrainingState) -> None:
    """At the end of a run: raise a TrainingError, on every rank, if no step has made an update and the last one trained
    no token."""
    progress = state.progress
    if state.steps_without_weight and progress.skipped_iterations == progress.iteration:
        steps = counted(progress.iteration, "iteration")
        raise TrainingError(
            f"nothing was learned: no token of the last {counted(state.steps_without_weight, 'iteration')} is trained, "
            f"and none of the run's {steps} changed the weights; {_WHERE_TRAINED}"
        )
