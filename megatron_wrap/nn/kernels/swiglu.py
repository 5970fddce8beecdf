"""SwiGLU: of dense layers by Liger-Kernel; of the rows of experts, also with a clamp and an offset, times each row's
weight, in Triton. Forward and backward read their inputs once; arithmetic is in fp32. Import it only where Triton is
installed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024


@triton.jit
def _weighted_swiglu_kernel(
    gates, weights, out, columns, gain, limit, offset, clamped: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        inside = column < columns
        gate = tl.load(gates + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
        if clamped:  # NaN stays NaN, which tl.minimum would replace
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = gate * tl.sigmoid(gain * gate) * (up + offset) * weight
        tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_swiglu_backward_kernel(
    gates,
    weights,
    grad_out,
    grad_gates,
    grad_weights,
    columns,
    gain,
    limit,
    offset,
    clamped: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros([block], dtype=tl.float32)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        inside = column < columns
        gate = tl.load(gates + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
        outer = tl.load(grad_out + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if clamped:
            free_gate, free_up = gate <= limit, (up <= limit) & (up >= -limit)
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        sigmoid = tl.sigmoid(gain * gate)
        active = gate * sigmoid
        total += outer * active * (up + offset)
        outer *= weight
        of_gate = outer * (up + offset) * sigmoid * (1.0 + gain * gate * (1.0 - sigmoid))
        of_up = outer * active
        if clamped:
            of_gate, of_up = tl.where(free_gate, of_gate, 0.0), tl.where(free_up, of_up, 0.0)
        tl.store(grad_gates + row * 2 * columns + column, of_gate.to(grad_gates.dtype.element_ty), mask=inside)
        tl.store(grad_gates + row * 2 * columns + columns + column, of_up.to(grad_gates.dtype.element_ty), mask=inside)
    tl.store(grad_weights + row, tl.sum(total, axis=0).to(grad_weights.dtype.element_ty))


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, weights: Tensor, gain: float, clamp: float | None, offset: float) -> Tensor:
        gates, weights = gates.contiguous(), weights.contiguous()
        rows, columns = gates.shape[0], gates.shape[1] // 2
        out = torch.empty(rows, columns, dtype=gates.dtype, device=gates.device)
        if out.numel():
            form = _form(gain, clamp, offset)
            _weighted_swiglu_kernel[(rows,)](gates, weights, out, columns, **form, **_launch(columns))
        ctx.form = gain, clamp, offset
        ctx.save_for_backward(gates, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        gates, weights = ctx.saved_tensors
        rows, columns = gates.shape[0], gates.shape[1] // 2
        grad_gates, grad_weights = torch.empty_like(gates), torch.empty_like(weights)
        if gates.numel():
            grad = grad_outputs[0].contiguous()
            _weighted_swiglu_backward_kernel[(rows,)](
                *(gates, weights, grad, grad_gates, grad_weights, columns), **_form(*ctx.form), **_launch(columns)
            )
        return grad_gates, grad_weights, None, None, None


def _form(gain: float, clamp: float | None, offset: float) -> dict[str, Any]:
    limit = 0.0 if clamp is None else float(clamp)
    return {"gain": float(gain), "limit": limit, "offset": float(offset), "clamped": clamp is not None}


def _launch(columns: int) -> dict[str, int]:
    block = min(_BLOCK, triton.next_power_of_2(columns))
    return {"block": block, "num_warps": max(1, min(8, block // 256))}


def weighted_swiglu(
    gates: Tensor, weights: Tensor, gain: float = 1.0, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """silu(first half) * second half of each row (Shazeer 2020, arXiv:2002.05202), times the row's weight.

    Args:
        gates: [R, 2F] on a GPU, in any floating dtype but float64.
        weights: [R], in any of these dtypes.
        gain: x * sigmoid(gain * x) instead of silu(x).
        clamp: the first half is at most this, the second within this and its negative.
        offset: added to the second half.

    Returns:
        [R, F] in the dtype of the gates.
    """
    result: Tensor = _WeightedSwiGLU.apply(gates, weights, gain, clamp, offset)
    return result


def swiglu(gates: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension (Shazeer 2020, arXiv:2002.05202, without biases).

    Args:
        gates: [..., 2F] on a GPU, in any floating dtype.

    Returns:
        [..., F] in the same dtype.
    """
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    rows = LigerFusedGateUpSiLUMulFunction.apply(gates.reshape(-1, gates.shape[-1]))
    return rows.view(*gates.shape[:-1], -1)
