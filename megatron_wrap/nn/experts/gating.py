"""The router's linear layer: fp32 logits of bf16 hidden states, on the tensor cores in both directions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.nn.kernels.available import has_triton
from megatron_wrap.nn.kernels.weight_gradients import can_accumulate_weight_gradients


def can_gate(hidden: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: str | None) -> bool:
    """Whether `gate` supports these tensors: fp32 logits of bf16 tensors on a GPU, without a bias."""
    halves = hidden.dtype == weight.dtype == torch.bfloat16
    return hidden.is_cuda and halves and bias is None and router_dtype == "fp32" and _multiplies(hidden.device)


@functools.cache
def _multiplies(device: torch.device) -> bool:
    return can_accumulate_weight_gradients(device)


def gate(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 logits [..., experts] of hidden states [..., H] and a weight [experts, H], both bf16.

    Results are those of fp32 matmuls: bf16 tensors are multiplied exactly and added up in fp32, and the gradient of the
    logits is split into three bf16 tensors that add up to it. The hidden states are not copied to fp32.
    """
    result: Tensor = _Gate.apply(hidden, weight)
    return result


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        logits = _fp32_product(hidden.reshape(-1, hidden.shape[-1]), weight.t())
        return logits.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        parts = _split(grads[0].reshape(-1, weight.shape[0]))
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = (parts @ torch.cat((weight, weight, weight))).view(hidden.shape)
        if ctx.needs_input_grad[1]:
            of_parts = _fp32_product(parts.t(), hidden.reshape(-1, hidden.shape[-1]))
            of_weight = of_parts.view(3, *weight.shape).sum(0).to(weight.dtype)
        return of_hidden, of_weight


def _split(values: Tensor) -> Tensor:
    """Three tensors side by side, bf16 [N, 3 * columns], with 8 of the fp32 values' 24 bits each."""
    if values.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.router.split import split

        return split(values)
    parts = []
    for _ in range(3):
        parts.append(values.bfloat16())
        values = values - parts[-1]
    return torch.cat(parts, dim=1)


def _fp32_product(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # as in the tests
