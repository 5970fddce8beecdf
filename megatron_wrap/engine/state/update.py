"""Result of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step; the same on every rank."""

    applied: bool = False
    """Parameters were updated; False on an fp16 overflow, or if the batch has no loss weight."""
    grad_norm: float = 0.0
    """Norm of the gradient over all parameters before clipping; 0 on an overflow."""
    num_zeros: int = 0
    """Number of zeros in the gradient, if they are counted."""
    is_bad: bool = False
    """Not applied, because the loss or the norm of the gradient is nan or infinite, or the loss is a spike."""


class BadUpdate(Exception):
    """The loss or the gradient norm of a step is nan or infinite, or the loss is a spike; no state was changed."""

    def __init__(self, loss: float, grad_norm: float) -> None:
        super().__init__(f"loss {loss}, grad_norm {grad_norm}")
        self.loss = loss
        self.grad_norm = grad_norm
