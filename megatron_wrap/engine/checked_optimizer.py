"""Megatron-Core's optimizer with a check that rejects a non-finite update before any state changes. Import this module
only after the platform is installed."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.optimizer import ChainedOptimizer

from megatron_wrap.engine.update import NonFiniteUpdate, Update


class CheckedOptimizer(ChainedOptimizer):
    """Megatron-Core's chained optimizer, with a check after the gradient norm is computed and before a parameter
    changes.

    In both supported Megatron-Core versions `ChainedOptimizer.step` computes the norm, also without clipping, and then
    calls `step_with_ready_grads`. The norm is the same on every rank, so all ranks decide the same without another
    collective.

    Args:
        optimizer: from `get_megatron_optimizer`; this object takes over its parts.
    """

    def __init__(self, optimizer: ChainedOptimizer) -> None:
        super().__init__(optimizer.chained_optimizers)
        self._loss: float | None = None
        self._grad_norm: Any = None

    def update(self, loss: float | None) -> Update:
        """Clip and apply the gradients. Collective.

        Args:
            loss: of the step, the same on every rank; None disables the check.

        Raises:
            NonFiniteUpdate: on every rank, if the loss or the gradient norm is not finite. Parameters, optimizer state
                and loss scale are unchanged, bit for bit. An fp16 overflow does not raise: the step is skipped and the
                loss scale lowered, as usual.
        """
        scalers = self._grad_scalers()
        saved = [scaler.state_dict() for scaler in scalers]
        self._loss = loss
        try:
            applied, grad_norm, num_zeros = self.step()
        except NonFiniteUpdate:
            for scaler, state in zip(scalers, saved, strict=True):
                scaler.load_state_dict(state)  # `prepare_grads` counted a step without overflow
            raise
        finally:
            self._loss = None
        return Update(bool(applied), float(grad_norm or 0.0), int(num_zeros or 0))

    @property
    def loss_scale(self) -> float:
        """Factor of the loss that avoids underflow; 1 without loss scaling, which needs no device synchronization."""
        scalers = self._grad_scalers()
        return float(scalers[0].scale) if scalers else 1.0

    def _grad_scalers(self) -> list[Any]:
        return [part.grad_scaler for part in self.chained_optimizers if getattr(part, "grad_scaler", None)]

    def get_grad_norm(self) -> Any:
        """Norm of the full gradient; stored for the check."""
        self._grad_norm = super().get_grad_norm()
        return self._grad_norm

    def step_with_ready_grads(self) -> bool:
        """Apply the clipped gradients, after the check that `update` requested."""
        if self._loss is not None:
            grad_norm = float(self._grad_norm)
            if not (math.isfinite(self._loss) and math.isfinite(grad_norm)):
                raise NonFiniteUpdate(self._loss, grad_norm)
        return super().step_with_ready_grads()
