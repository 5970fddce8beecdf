"""Megatron-Core's optimizer with its step in parts: the check for a non-finite update and the metrics share one
synchronization, during which the device already updates. Import this module only after the platform is installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, clip_grads
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch import Tensor

from megatron_wrap.engine.state.state import Update
from megatron_wrap.nn.kernels.available import has_triton
from megatron_wrap.parallel.collectives import reduce_in_place
from megatron_wrap.platform.megatron_core.adam import GroupStepAdam, model_copies, without_model_copies
from megatron_wrap.platform.megatron_core.versions import gradients_for_norm, largest_gradient_norm


class KernelAdam(GroupStepAdam):
    """See `GroupStepAdam`. On a GPU with Triton, a kernel reads each gradient once, applies `gradient_factor`, and
    writes copies of the parameters in the model's dtype. Elsewhere torch multiplies copies of a few gradients at a
    time."""

    copies: Mapping[Tensor, Tensor] | None = None
    """Parameter -> copy that the next steps also write, as in `write_copies`; None: no copies."""

    def write_copies(self, copies: Mapping[Tensor, Tensor] | None) -> None:
        """Let the next steps also write new values to these copies of parameters, as in `model_copies`; None: to
        none."""
        self.copies = copies

    def _update_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        copies = self.copies or {}
        if not (params and has_triton() and all(param.is_cuda for param in params)):
            super()._update_group(params, group)
            for param in params:
                if param in copies:
                    copies[param].view(-1).copy_(param.view(-1))
            return
        from megatron_wrap.nn.kernels.optimizer import update

        factor = self.gradient_factor
        if not isinstance(factor, Tensor):
            factor = torch.full((), factor, dtype=torch.float32, device=params[0].device)
        for param in params:
            state, grad = self.state[param], param.grad
            assert grad is not None
            update(
                *(param, grad, state["exp_avg"], state["exp_avg_sq"]),
                step=group["step"],
                factor=factor,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=self.adam_w_mode,
                copy=copies.get(param),
            )


_LARGE = 2**22
"""Number of elements from which on a gradient has a separate kernel that sums its squares."""


class CheckedOptimizer(ChainedOptimizer):
    """Megatron-Core's chained optimizer. `prepare` computes the gradient norm on the device; `update` takes it from the
    host, checks it before a parameter changes, and clips and applies the gradients. Where Adam can make the check on
    the device, `start_update` queues the update before the host knows the norm, and `update` only reports.

    In both supported Megatron-Core versions `ChainedOptimizer.step` calls `prepare_grads`, `get_grad_norm` (with and
    without clipping) and then `step_with_ready_grads`; the first two return the results of `prepare` here. The norm is
    the same on every rank, so all ranks decide alike without another collective.

    Args:
        parts: the optimizers in the result of `get_megatron_optimizer`, which then belong to this object.
    """

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts)
        self._scaler_states: list[Any] = []
        self._square_sums: list[Tensor] = []
        self._overflow = self._is_started = False
        self._grad_norm = 0.0
        self._knows_copies = False

    def prepare(self, device: torch.device) -> list[Tensor]:
        """Unscale the gradients, and compute the square of their norm on the device. Collective.

        Args:
            device: of the gradients.

        Returns:
            Summands of the squared norm over all parameters, each fp32 [1] and the same on every rank, whose values
            `update` takes.
        """
        self._scaler_states = [scaler.state_dict() for scaler in self._grad_scalers()]
        self._overflow, self._is_started = super().prepare_grads(), False
        parts = self.chained_optimizers
        together = bool(parts) and (len(parts) == 1 or self.grads_states_parallel_group_is_shared())
        self._square_sums = [
            _square_sum(
                [gradient for part in group for gradient in gradients_for_norm(part)],
                group[0].get_grad_stats_parallel_group(),
                device,
            )
            for group in ([parts] if together else [[part] for part in parts])
        ]
        return self._square_sums

    def start_update(self, loss_is_finite: Tensor | None) -> None:
        """Queue the update after `prepare`, if the host needs no value for it: Adam's kernels change nothing where the
        device finds that `update` with is_spike=False would not apply the gradients.

        Args:
            loss_is_finite: bool with one element on the device, the same on every rank; None: as loss=None of `update`.
        """
        if not self._scales_gradients or self._grad_scalers() or self.config.log_num_zeros_in_grad:
            return
        norm = torch.stack(self._square_sums).double().sum().sqrt()
        is_applied = torch.logical_not(norm > self._largest_norm)
        if loss_is_finite is not None:
            is_applied = is_applied & loss_is_finite & norm.isfinite()

        def factor(limit: float) -> Tensor:
            ratio = limit / (norm + 1.0e-6)
            return torch.where(is_applied, torch.where(ratio < 1.0, ratio, 1.0), math.nan).float()

        self._scale(factor)
        self._is_started = True

    def update(self, loss: float | None, square_sums: Sequence[float], is_spike: bool = False) -> Update:
        """Clip and apply the gradients that `prepare` made ready, unless `start_update` has done so.

        Args:
            loss: of the step, the same on every rank; None disables the check.
            square_sums: the values of what `prepare` returned.
            is_spike: the loss is refused although it is finite; not after `start_update`.

        Returns:
            The same on every rank. If the loss or the gradient norm is not finite, or is_spike, the update is bad:
            parameters, optimizer state and loss scale are unchanged, bit for bit. An fp16 overflow is not: the step is
            skipped and the loss scale lowered, as usual.
        """
        self._grad_norm = math.sqrt(math.fsum(square_sums))
        is_finite = loss is None or (math.isfinite(loss) and math.isfinite(self._grad_norm))
        is_bad = loss is not None and not self._overflow and (is_spike or not is_finite)
        if self._is_started:
            return self._started_update(is_bad)
        if is_bad:
            for scaler, state in zip(self._grad_scalers(), self._scaler_states, strict=True):
                scaler.load_state_dict(state)  # `prepare_grads` counted a step without overflow
            return Update(grad_norm=self._grad_norm, is_bad=True)
        applied, grad_norm, num_zeros = self._scaling_step() if self._scales_gradients else self.step()
        return Update(bool(applied), float(grad_norm or 0.0), int(num_zeros or 0))

    def _started_update(self, is_bad: bool) -> Update:
        self._is_started = False
        is_applied = not (is_bad or self._grad_norm > self._largest_norm)
        if not is_applied:
            for part in self._with_optimizers:
                part.optimizer.uncount_step()
        return Update(is_applied, self._grad_norm, is_bad=is_bad)

    @property
    def _with_optimizers(self) -> list[Any]:
        return [part for part in self.chained_optimizers if part.optimizer is not None]

    @property
    def _scales_gradients(self) -> bool:
        """Whether Adam multiplies the gradients by the clipping factor itself."""
        parts = self._with_optimizers
        return bool(parts) and all(isinstance(part.optimizer, KernelAdam) for part in parts)

    @property
    def _largest_norm(self) -> float:
        """Largest gradient norm with which the gradients are applied."""
        return min(largest_gradient_norm(part.config) for part in self.chained_optimizers)

    def _scaling_step(self) -> tuple[bool, float, int]:
        """Megatron-Core's `step` without separate passes for clipping and for the copies of parameters in half
        precision."""
        if self._overflow:
            return False, 0.0, 0
        num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else 0
        if self._grad_norm > self._largest_norm:
            return False, self._grad_norm, num_zeros
        applied = self._scale(lambda limit: min(1.0, limit / (self._grad_norm + 1.0e-6)))
        return applied, self._grad_norm, num_zeros

    def _scale(self, factor: Callable[[float], float | Tensor]) -> bool:
        """Apply the gradients.

        Args:
            factor: the clipping factor, as in Megatron-Core's clip_grad_by_total_norm_fp32.
        """
        parts = self._with_optimizers
        for part in parts:
            limit = part.config.clip_grad
            part.optimizer.scale_gradients(factor(limit if limit > 0.0 else math.inf))
        if not self._knows_copies:
            self._knows_copies = True
            for part in parts:
                part.optimizer.write_copies(model_copies(part))
        with without_model_copies(part for part in parts if part.optimizer.copies is not None):
            return bool(self.step_with_ready_grads())

    @property
    def loss_scale(self) -> float:
        """Factor of the loss that avoids underflow; 1 without loss scaling, which needs no device synchronization."""
        scalers = self._grad_scalers()
        return float(scalers[0].scale) if scalers else 1.0

    def _grad_scalers(self) -> list[Any]:
        parts = (part for part in self.chained_optimizers if isinstance(part, MixedPrecisionOptimizer))
        return [part.grad_scaler for part in parts if part.grad_scaler is not None]

    def prepare_grads(self) -> bool:
        """Whether there is an fp16 overflow; `prepare` has already prepared the gradients."""
        return self._overflow

    def get_grad_norm(self) -> float:
        """Norm of the full gradient, from the arguments of `update`."""
        return self._grad_norm


def _square_sum(gradients: list[Tensor], group: Any, device: torch.device) -> Tensor:
    """Sum of squares over this rank's gradients and those of the group, fp32 [1] on the device, as in Megatron-Core's
    `get_grad_norm_fp32`, which ends with a synchronization."""
    total = torch.zeros(1, dtype=torch.float32, device=device)
    large = [gradient for gradient in gradients if _is_large(gradient)]
    others = [gradient for gradient in gradients if not _is_large(gradient)]
    if large:
        from megatron_wrap.nn.kernels.optimizer import square_sum

        total += square_sum(large)
    if others:
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [others], False)
        total += norm**2.0
    reduce_in_place(total, "sum", group)
    return total


def _is_large(gradient: Tensor) -> bool:
    """Whether a separate kernel sums the squares of this gradient faster than a kernel for many tensors."""
    return gradient.is_cuda and gradient.numel() >= _LARGE and gradient.is_contiguous() and has_triton()
