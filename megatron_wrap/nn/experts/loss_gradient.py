"""Gradients of routers' losses that the forward pass computes, for the backward pass of the objective."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor


def with_loss_gradient(activation: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
    """Attach a loss's gradient to `activation`, which is returned. In its backward pass `values` get `gradient`, times
    the scale of auxiliary losses that Megatron-Core's schedule sets for each micro-batch. This is
    `MoEAuxLossAutoScaler` for a loss with a known derivative.

    Args:
        gradient: the derivative of the loss by `values`, in their shape.
    """
    result: Tensor = _WithLossGradient.apply(activation, values, gradient)
    return result


class _WithLossGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return activation

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return grads[0], gradient if scale is None else gradient * scale, None
