"""RMSNorm in Triton: forward and backward each read their inputs once. Import it only where Triton is installed.

A program of the forward normalizes one row; one of the backward processes many rows and adds up their part of the
gradient of gamma. Arithmetic is in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_PROGRAMS_PER_PROCESSOR = 4
_SUMMED_ROWS, _SUMMED_COLUMNS = 256, 16
"""Of the parts of gamma's gradient, in one iteration of a program."""


@triton.jit
def _rms_norm_forward_kernel(x, gamma, y, scale, columns, eps, zero_centered: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / columns + eps)
    weight = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
    if zero_centered:
        weight += 1.0
    tl.store(scale + row, inverse)
    tl.store(y + row * columns + column, (value * inverse * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward_kernel(
    x, gamma, scale, grad_y, grad_x, grad_gamma, rows, columns, zero_centered: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < columns
    weight = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
    if zero_centered:
        weight += 1.0
    total = tl.zeros([block], dtype=tl.float32)
    for index in range(program, rows, tl.num_programs(0)):
        row = index.to(tl.int64)  # type: ignore[attr-defined]
        value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        outer = tl.load(grad_y + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row)
        normal = value * inverse
        total += outer * normal
        outer *= weight
        share = tl.sum(outer * normal, axis=0) / columns
        result = (outer - normal * share) * inverse
        tl.store(grad_x + row * columns + column, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_gamma + program.to(tl.int64) * columns + column, total, mask=inside)


@triton.jit
def _sum_kernel(parts, total, rows, columns, block_rows: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < columns
    sums = tl.zeros([block_rows, block], dtype=tl.float32)
    for start in range(0, rows, block_rows):
        row = start + tl.arange(0, block_rows)
        cells = (row < rows)[:, None] & inside[None, :]
        sums += tl.load(parts + row[:, None] * columns + column[None, :], mask=cells, other=0.0)
    tl.store(total + column, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=inside)


def _summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, columns] in fp32 -> [columns]; torch's sum takes 13 us for 528 rows of 2,048 (H200, 2026-11-26)."""
    rows, columns = parts.shape
    total = torch.empty(columns, dtype=dtype, device=parts.device)
    _sum_kernel[(triton.cdiv(columns, _SUMMED_COLUMNS),)](
        parts, total, rows, columns, block_rows=_SUMMED_ROWS, block=_SUMMED_COLUMNS, num_warps=8
    )
    return total


def _launch(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"block": block, "num_warps": max(1, min(16, block // 512))}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float, zero_centered: bool) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        rows, columns = flat.shape
        y = torch.empty(rows, columns, dtype=gamma.dtype, device=x.device)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)  # factor of each row
        _rms_norm_forward_kernel[(rows,)](
            flat, gamma, y, scale, columns, eps, zero_centered=zero_centered, **_launch(columns)
        )
        ctx.save_for_backward(flat, gamma, scale)
        ctx.zero_centered = zero_centered
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, gamma, scale = ctx.saved_tensors
        rows, columns = x.shape
        grad_y = grad_outputs[0].reshape(x.shape).contiguous()
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        programs = min(rows, processors * _PROGRAMS_PER_PROCESSOR)
        grad_x = torch.empty_like(x)
        parts = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
        _rms_norm_backward_kernel[(programs,)](
            x, gamma, scale, grad_y, grad_x, parts, rows, columns, zero_centered=ctx.zero_centered, **_launch(columns)
        )
        grad_gamma = _summed(parts, gamma.dtype) if ctx.needs_input_grad[1] else None
        return grad_x.view(grad_outputs[0].shape), grad_gamma, None, None


def rms_norm(x: Tensor, gamma: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        x: [..., H] on a GPU, H at most `available.MAX_NORM_COLUMNS`; computed in fp32.
        gamma: [H].
        zero_centered: gamma is stored minus 1.

    Returns:
        [..., H] in gamma's dtype.
    """
    return _RMSNorm.apply(x, gamma, eps, zero_centered)
