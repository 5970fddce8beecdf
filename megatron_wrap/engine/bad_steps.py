"""What happens to a step whose loss or gradient is not finite, and to batches without a trained token."""

from __future__ import annotations

import math

from megatron_wrap.engine.replay import cause_of_non_finite
from megatron_wrap.engine.state.open_step import OpenStep
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import TrainingError
from megatron_wrap.utils.dist_logger import logger

_HINT = (
    "lower the learning rate or inspect the batch; megatron_wrap.bad_steps.on_bad_step: skip leaves such steps out, "
    "megatron_lm.train.common.check_for_nan_in_loss_and_grad: false disables this check"
)


def refuse_or_skip(state: TrainingState, step: OpenStep, loss: float, grad_norm: float) -> None:
    """Find the cause of a non-finite loss or gradient; refuse the step, or count it and warn, as
    `megatron_wrap.bad_steps` says. Collective; all ranks decide alike.

    Args:
        step: its parameters are not updated.
        loss, grad_norm: the same on every rank; at least one is not finite.

    Raises:
        TrainingError: on every rank, with the cause; nothing has changed.
    """
    settings, in_a_row = state.config.bad_steps, state.bad_steps_in_a_row + 1
    values = {"loss": loss, "grad_norm": grad_norm}
    non_finite = " and ".join(name for name, value in values.items() if not math.isfinite(value))
    problem = (
        f"{non_finite} of iteration {state.progress.iteration + 1} not finite (loss {loss}, grad_norm {grad_norm}): "
        f"{cause_of_non_finite(state, step)}"
    )
    if settings.on_bad_step == "stop":
        raise TrainingError(f"{problem}; nothing was updated; {_HINT}")
    if in_a_row >= settings.max_in_a_row:
        raise TrainingError(
            f"{problem}; nothing was updated; it is number {in_a_row} of such steps in a row, as many as end the run "
            "(megatron_wrap.bad_steps.max_in_a_row); lower the learning rate, or inspect the batches"
        )
    logger.warning_rank_0(
        f"{problem}; the step is skipped, {in_a_row} in a row (megatron_wrap.bad_steps.on_bad_step: skip)"
    )
    state.bad_steps_in_a_row = in_a_row
    state.progress.bad_steps += 1


def refuse_steps_without_weight(state: TrainingState, has_weight: bool) -> None:
    """Count the steps in a row whose batch has no loss weight; the same on every rank.

    Raises:
        TrainingError: there are `max_without_loss`.
    """
    state.steps_without_weight = 0 if has_weight else state.steps_without_weight + 1
    most = state.config.bad_steps.max_without_loss
    if state.steps_without_weight < most:
        return
    before, batches = (f", nor of the {most - 1} before it", "their batches") if most > 1 else ("", "its batch")
    raise TrainingError(
        f"no token of iteration {state.progress.iteration + 1} is trained{before}: all loss weights of {batches} are "
        "0, so nothing is learned; megatron-wrap inspect-data shows which tokens of the data have a loss; "
        f"megatron_wrap.bad_steps.max_without_loss: {most} is the number of such batches in a row that ends the run"
    )
