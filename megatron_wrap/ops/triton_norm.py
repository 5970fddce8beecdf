"""Triton kernels of RMSNorm: forward and backward each read their inputs once.

Imported only for tensors on a GPU. A program of the forward normalizes one row; one of the backward processes many rows
and adds up their part of the gradient of gamma. Arithmetic is in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _rms_norm_forward_kernel(x, gamma, y, scale, columns, eps, zero_centered: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, block)
    inside = place < columns
    value = tl.load(x + row * columns + place, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / columns + eps)
    weight = tl.load(gamma + place, mask=inside, other=0.0).to(tl.float32)
    if zero_centered:
        weight += 1.0
    tl.store(scale + row, inverse)
    tl.store(y + row * columns + place, (value * inverse * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward_kernel(
    x, gamma, scale, grad_y, grad_x, grad_gamma, rows, columns, zero_centered: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0)
    place = tl.arange(0, block)
    inside = place < columns
    weight = tl.load(gamma + place, mask=inside, other=0.0).to(tl.float32)
    if zero_centered:
        weight += 1.0
    total = tl.zeros([block], dtype=tl.float32)
    for index in range(program, rows, tl.num_programs(0)):
        row = index.to(tl.int64)  # type: ignore[attr-defined]
        value = tl.load(x + row * columns + place, mask=inside, other=0.0).to(tl.float32)
        outer = tl.load(grad_y + row * columns + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row)
        normal = value * inverse
        total += outer * normal
        outer *= weight
        share = tl.sum(outer * normal, axis=0) / columns
        result = (outer - normal * share) * inverse
        tl.store(grad_x + row * columns + place, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_gamma + program.to(tl.int64) * columns + place, total, mask=inside)


def _launch(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"block": block, "num_warps": max(1, min(16, block // 512))}


def rms_norm(x: Tensor, gamma: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Contiguous [N, H] -> the normalized rows [N, H] in gamma's dtype, and the fp32 factors [N] of the rows."""
    rows, columns = x.shape
    y = torch.empty(rows, columns, dtype=gamma.dtype, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    _rms_norm_forward_kernel[(rows,)](x, gamma, y, scale, columns, eps, zero_centered=zero_centered, **_launch(columns))
    return y, scale


def rms_norm_gradients(
    x: Tensor, gamma: Tensor, scale: Tensor, grad_y: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x [N, H] and gamma [H] in their dtypes, from the contiguous gradient of the result [N, H]."""
    rows, columns = x.shape
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(rows, processors * _PROGRAMS_PER_PROCESSOR)
    grad_x = torch.empty_like(x)
    parts = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    _rms_norm_backward_kernel[(programs,)](
        x, gamma, scale, grad_y, grad_x, parts, rows, columns, zero_centered=zero_centered, **_launch(columns)
    )
    return grad_x, parts.sum(dim=0).to(gamma.dtype)
