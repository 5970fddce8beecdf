"""What happens to a step whose loss or gradient is not finite."""

from __future__ import annotations

import math

from megatron_wrap.engine.replay import cause_of_non_finite
from megatron_wrap.engine.state.open_step import OpenStep
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import TrainingError

_HINT = (
    "lower the learning rate or inspect the batch; megatron_lm.train.common.check_for_nan_in_loss_and_grad: false "
    "disables this check"
)


def refuse(state: TrainingState, step: OpenStep, loss: float, grad_norm: float) -> None:
    """Find the cause, and refuse the step. Collective.

    Args:
        step: its parameters are not updated.
        loss, grad_norm: the same on every rank; at least one is not finite.

    Raises:
        TrainingError: on every rank, with the cause.
    """
    values = {"loss": loss, "grad_norm": grad_norm}
    non_finite = " and ".join(name for name, value in values.items() if not math.isfinite(value))
    raise TrainingError(
        f"{non_finite} of iteration {state.progress.iteration + 1} not finite (loss {loss}, grad_norm {grad_norm}): "
        f"{cause_of_non_finite(state, step)}; nothing was updated; {_HINT}"
    )
