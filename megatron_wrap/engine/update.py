"""What an optimizer step did, or why it was refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Update:
    """What one optimizer step did; the same on every rank."""

    applied: bool = False
    """Parameters were updated; False on an fp16 overflow, or where there was nothing to learn."""
    grad_norm: float = 0.0
    """Norm of the whole gradient before clipping; 0 on an overflow."""
    num_zeros: int = 0
    """Zeros among the gradients, where they are counted."""


class NonFiniteUpdate(Exception):
    """The loss or the gradient norm of a step is nan or infinite; nothing was changed."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss}, grad_norm {grad_norm}")
        self.loss = loss
        self.grad_norm = grad_norm
