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
    """Not applied, and no state changed: the loss or the norm of the gradient is not finite, or the loss is a spike."""
