"""Triton kernels of SwiGLU: forward and backward each read their inputs once and write their result once.

Imported only for tensors on a GPU. A program processes one block of columns of one token; arithmetic is in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Columns per program."""


@triton.jit
def _swiglu_forward_kernel(gates, out, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < columns
    base = gates + row * 2 * columns
    gate = tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    linear = tl.load(base + columns + place, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * linear
    tl.store(out + row * columns + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gates, grad_out, grad, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < columns
    base = gates + row * 2 * columns
    gate = tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    linear = tl.load(base + columns + place, mask=inside, other=0.0).to(tl.float32)
    outer = tl.load(grad_out + row * columns + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    swish = gate * sigmoid
    of_gate = outer * linear * (sigmoid + swish * (1 - sigmoid))
    target = grad + row * 2 * columns
    tl.store(target + place, of_gate.to(grad.dtype.element_ty), mask=inside)
    tl.store(target + columns + place, (outer * swish).to(grad.dtype.element_ty), mask=inside)


def swiglu_forward(gates: Tensor) -> Tensor:
    """silu(first half) * second half of each row: contiguous [N, 2F] -> [N, F] in the same dtype."""
    rows, columns = gates.shape[0], gates.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gates.dtype, device=gates.device)
    _swiglu_forward_kernel[(rows, triton.cdiv(columns, BLOCK))](gates, out, columns, block=BLOCK, num_warps=8)
    return out


def swiglu_backward(gates: Tensor, grad_out: Tensor) -> Tensor:
    """Gradient with respect to the gates: contiguous [N, 2F] and [N, F] -> [N, 2F] in the gates' dtype."""
    rows, columns = grad_out.shape
    grad = torch.empty_like(gates)
    _swiglu_backward_kernel[(rows, triton.cdiv(columns, BLOCK))](
        gates, grad_out, grad, columns, block=BLOCK, num_warps=8
    )
    return grad
