"""Megatron-Core's optimizer with its step in two halves, so that the check for a non-finite update and the metrics need
one synchronization together. Import this module only after the platform is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, clip_grads
from torch import Tensor

from megatron_wrap.engine.state.kernel_adam import KernelAdam
from megatron_wrap.engine.state.open_step import Update
from megatron_wrap.parallel.collectives import reduce_in_place
from megatron_wrap.platform.megatron_core.adam import model_copies, without_model_copies
from megatron_wrap.platform.megatron_core.versions import gradients_for_norm


class CheckedOptimizer(ChainedOptimizer):
    """Megatron-Core's chained optimizer. `prepare` computes the gradient norm on the device; `update` takes it from the
    host, checks it before a parameter changes, and clips and applies the gradients.

    In both supported Megatron-Core versions `ChainedOptimizer.step` calls `prepare_grads`, `get_grad_norm` (with and
    without clipping) and then `step_with_ready_grads`; the first two return the results of `prepare` here. The norm is
    the same on every rank, so all ranks decide alike without another collective.

    Args:
        parts: of what `get_megatron_optimizer` returns; this object takes them over.
    """

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts)
        self._scaler_states: list[Any] = []
        self._overflow = False
        self._grad_norm = 0.0
        self._knows_copies = False

    def prepare(self, device: torch.device) -> list[Tensor]:
        """Unscale the gradients, and compute the square of their norm on the device. Collective.

        Args:
            device: of the gradients.

        Returns:
            Summands of the squared norm over all parameters, each fp32 [1] and the same on every rank; pass their
            values to `update`.
        """
        self._scaler_states = [scaler.state_dict() for scaler in self._grad_scalers()]
        self._overflow = super().prepare_grads()
        parts = self.chained_optimizers
        if not parts:
            return []
        if len(parts) == 1 or self.grads_states_parallel_group_is_shared():
            gradients = [gradient for part in parts for gradient in gradients_for_norm(part)]
            return [_square_sum(gradients, parts[0].get_grad_stats_parallel_group(), device)]
        return [_square_sum(gradients_for_norm(part), part.get_grad_stats_parallel_group(), device) for part in parts]

    def update(self, loss: float | None, square_sums: Sequence[float], is_spike: bool = False) -> Update:
        """Clip and apply the gradients that `prepare` made ready.

        Args:
            loss: of the step, the same on every rank; None disables the check.
            square_sums: the values of what `prepare` returned.
            is_spike: the loss is refused although it is finite.

        Returns:
            The same on every rank. If the loss or the gradient norm is not finite, or is_spike, the update is bad:
            parameters, optimizer state and loss scale are unchanged, bit for bit. An fp16 overflow is not: the step is
            skipped and the loss scale lowered, as usual.
        """
        self._grad_norm = math.sqrt(math.fsum(square_sums))
        is_finite = loss is None or (math.isfinite(loss) and math.isfinite(self._grad_norm))
        if loss is not None and not self._overflow and (is_spike or not is_finite):
            for scaler, state in zip(self._grad_scalers(), self._scaler_states, strict=True):
                scaler.load_state_dict(state)  # `prepare_grads` counted a step without overflow
            return Update(grad_norm=self._grad_norm, is_bad=True)
        applied, grad_norm, num_zeros = self._scaling_step() if self._scales_gradients else self.step()
        return Update(bool(applied), float(grad_norm or 0.0), int(num_zeros or 0))

    @property
    def _scales_gradients(self) -> bool:
        """Whether Adam multiplies the gradients by the clipping factor itself."""
        optimizers = [part.optimizer for part in self.chained_optimizers if part.optimizer is not None]
        return bool(optimizers) and all(isinstance(optimizer, KernelAdam) for optimizer in optimizers)

    def _scaling_step(self) -> tuple[bool, float, int]:
        """`step`, without passes for clipping and for the copies of parameters in half precision."""
        if self._overflow:
            return False, 0.0, 0
        num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else 0
        thresholds = (getattr(part.config, "grad_norm_skip_threshold", math.inf) for part in self.chained_optimizers)
        if self._grad_norm > min(thresholds):
            return False, self._grad_norm, num_zeros
        parts = [part for part in self.chained_optimizers if part.optimizer is not None]
        for part in parts:  # the factor is that of Megatron-Core's clip_grad_by_total_norm_fp32
            limit = part.config.clip_grad
            factor = min(1.0, limit / (self._grad_norm + 1.0e-6)) if limit > 0.0 else 1.0
            part.optimizer.scale_gradients(factor)
        if not self._knows_copies:
            self._knows_copies = True
            for part in parts:
                part.optimizer.write_copies(model_copies(part))
        with without_model_copies(part for part in parts if part.optimizer.copies is not None):
            return self.step_with_ready_grads(), self._grad_norm, num_zeros

    @property
    def loss_scale(self) -> float:
        """Factor of the loss that avoids underflow; 1 without loss scaling, which needs no device synchronization."""
        scalers = self._grad_scalers()
        return float(scalers[0].scale) if scalers else 1.0

    def _grad_scalers(self) -> list[Any]:
        return [part.grad_scaler for part in self.chained_optimizers if getattr(part, "grad_scaler", None)]

    def prepare_grads(self) -> bool:
        """Whether there is an fp16 overflow; `prepare` has prepared the gradients already."""
        return self._overflow

    def get_grad_norm(self) -> float:
        """Norm of the full gradient, from the arguments of `update`."""
        return self._grad_norm


def _square_sum(gradients: list[Tensor], group: Any, device: torch.device) -> Tensor:
    """Sum of squares over this rank's gradients and those of the group, fp32 [1] on the device, as in Megatron-Core's
    `get_grad_norm_fp32`, which ends with a synchronization."""
    total = torch.zeros(1, dtype=torch.float32, device=device)
    if gradients:
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
        total = norm**2.0
    reduce_in_place(total, "sum", group)
    return total
