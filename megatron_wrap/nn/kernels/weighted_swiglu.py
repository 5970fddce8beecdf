"""SwiGLU of the rows of experts, times each row's weight, in Triton: forward and backward read their inputs once.
Arithmetic is in fp32. Import it only where Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024


@triton.jit
def _forward_kernel(gates, weights, out, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        inside = column < columns
        gate = tl.load(gates + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(gates, weights, grad_out, grad_gates, grad_weights, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros([block], dtype=tl.float32)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        inside = column < columns
        gate = tl.load(gates + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
        outer = tl.load(grad_out + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += outer * silu * up
        outer *= weight
        of_gate = outer * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        of_up = outer * silu
        tl.store(grad_gates + row * 2 * columns + column, of_gate.to(grad_gates.dtype.element_ty), mask=inside)
        tl.store(grad_gates + row * 2 * columns + columns + column, of_up.to(grad_gates.dtype.element_ty), mask=inside)
    tl.store(grad_weights + row, tl.sum(total, axis=0).to(grad_weights.dtype.element_ty))


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, weights: Tensor) -> Tensor:
        gates, weights = gates.contiguous(), weights.contiguous()
        rows, columns = gates.shape[0], gates.shape[1] // 2
        out = torch.empty(rows, columns, dtype=gates.dtype, device=gates.device)
        if out.numel():
            _forward_kernel[(rows,)](gates, weights, out, columns, **_launch(columns))
        ctx.save_for_backward(gates, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        gates, weights = ctx.saved_tensors
        rows, columns = gates.shape[0], gates.shape[1] // 2
        grad_gates, grad_weights = torch.empty_like(gates), torch.empty_like(weights)
        if gates.numel():
            _backward_kernel[(rows,)](
                gates, weights, grad_outputs[0].contiguous(), grad_gates, grad_weights, columns, **_launch(columns)
            )
        return grad_gates, grad_weights


def _launch(columns: int) -> dict[str, int]:
    block = min(_BLOCK, triton.next_power_of_2(columns))
    return {"block": block, "num_warps": max(1, min(8, block // 256))}


def weighted_swiglu(gates: Tensor, weights: Tensor) -> Tensor:
    """silu(first half) * second half of each row (Shazeer 2020, arXiv:2002.05202), times the row's weight.

    Args:
        gates: [R, 2F] on a GPU, in any floating dtype but float64.
        weights: [R], in any of these dtypes.

    Returns:
        [R, F] in the dtype of the gates.
    """
    result: Tensor = _WeightedSwiGLU.apply(gates, weights)
    return result
