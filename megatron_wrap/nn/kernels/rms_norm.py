"""RMSNorm in Triton: forward and backward each read their inputs once. Import it only where Triton is installed.

A program of the forward normalizes one row, or several short ones; one of the backward processes many rows and adds up
their part of the gradient of gamma. Arithmetic is in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS_PER_PROCESSOR = {False: 4, True: 8}
"""Backward programs for each multiprocessor; True: rows are short, and so are the programs' parts of gamma's
gradient."""
TILE_ELEMENTS = 2048
"""Elements of the rows that a program processes at once, at least one row; several short ones, such as those of
heads."""
_SUMMED_ROWS, _SUMMED_COLUMNS = 256, 16
"""Rows and columns of the parts of gamma's gradient that a program adds up in one iteration."""


@triton.jit
def _weight(gamma, column, columns, zero_centered: tl.constexpr):
    weight = tl.load(gamma + column, mask=column < columns, other=0.0).to(tl.float32)
    if zero_centered:
        weight += 1.0
    return weight[None, :]


@triton.jit
def _rms_norm_forward_kernel(
    x,
    gamma,
    y,
    scale,
    rows,
    columns,
    eps,
    zero_centered: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.arange(0, block)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    cell = row[:, None] * columns + column[None, :]
    value = tl.load(x + cell, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / columns + eps)
    tl.store(scale + row, inverse, mask=row < rows)
    result = value * inverse[:, None] * _weight(gamma, column, columns, zero_centered)
    tl.store(y + cell, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward_kernel(
    x,
    gamma,
    scale,
    grad_y,
    grad_x,
    grad_gamma,
    rows,
    columns,
    zero_centered: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, block)
    weight = _weight(gamma, column, columns, zero_centered)
    total = tl.zeros([tile, block], dtype=tl.float32)
    for first in range(program * tile, rows, tl.num_programs(0) * tile):
        row = tl.arange(0, tile).to(tl.int64) + first
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        cell = row[:, None] * columns + column[None, :]
        value = tl.load(x + cell, mask=inside, other=0.0).to(tl.float32)
        outer = tl.load(grad_y + cell, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        normal = value * inverse
        total += outer * normal
        outer *= weight
        share = tl.sum(outer * normal, axis=1)[:, None] / columns
        result = (outer - normal * share) * inverse
        tl.store(grad_x + cell, result.to(grad_x.dtype.element_ty), mask=inside)
    part = grad_gamma + program.to(tl.int64) * columns + column
    tl.store(part, tl.sum(total, axis=0), mask=column < columns)


@triton.jit
def _rms_norm_sum_kernel(parts, total, rows, columns, block_rows: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < columns
    sums = tl.zeros([block_rows, block], dtype=tl.float32)
    for start in range(0, rows, block_rows):
        row = start + tl.arange(0, block_rows)
        cells = (row < rows)[:, None] & inside[None, :]
        sums += tl.load(parts + row[:, None] * columns + column[None, :], mask=cells, other=0.0)
    tl.store(total + column, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=inside)


def summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over rows, fp32 [rows, columns] -> [columns]; torch's sum takes 13 us for 528 rows of 2,048 (H200,
    2026-11-26)."""
    rows, columns = parts.shape
    total = torch.empty(columns, dtype=dtype, device=parts.device)
    _rms_norm_sum_kernel[(triton.cdiv(columns, _SUMMED_COLUMNS),)](
        parts, total, rows, columns, block_rows=_SUMMED_ROWS, block=_SUMMED_COLUMNS, num_warps=8
    )
    return total


def _launch(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    tile = max(1, TILE_ELEMENTS // block)
    return {"tile": tile, "block": block, "num_warps": max(1, min(16, tile * block // 512))}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float, zero_centered: bool) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        rows, columns = flat.shape
        y = torch.empty(rows, columns, dtype=gamma.dtype, device=x.device)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)  # factor of each row
        launch = _launch(columns)
        _rms_norm_forward_kernel[(triton.cdiv(rows, launch["tile"]),)](
            flat, gamma, y, scale, rows, columns, eps, zero_centered=zero_centered, **launch
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
        launch = _launch(columns)
        most = processors * PROGRAMS_PER_PROCESSOR[launch["tile"] > 1]
        programs = min(triton.cdiv(rows, launch["tile"]), most)
        grad_x = torch.empty_like(x)
        parts = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
        _rms_norm_backward_kernel[(programs,)](
            x, gamma, scale, grad_y, grad_x, parts, rows, columns, zero_centered=ctx.zero_centered, **launch
        )
        grad_gamma = summed(parts, gamma.dtype) if ctx.needs_input_grad[1] else None
        return grad_x.view(grad_outputs[0].shape), grad_gamma, None, None


def rms_norm(x: Tensor, gamma: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        x: [..., H] on a GPU, H at most `nn/layers/norm.py`'s `MAX_NORM_COLUMNS`; computed in fp32.
        gamma: [H].
        zero_centered: gamma is stored minus 1.

    Returns:
        [..., H] in gamma's dtype.
    """
    return _RMSNorm.apply(x, gamma, eps, zero_centered)
