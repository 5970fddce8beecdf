"""Adam whose step is a kernel of this package where Triton runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.nn.kernels.available import has_triton
from megatron_wrap.platform.megatron_core.adam import GroupStepAdam


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
