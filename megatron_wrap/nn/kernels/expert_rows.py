"""The movement of rows between tokens and experts in Triton, in both directions: each row is read and written once.
Import it only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _sum_rows_kernel(rows, indices, out, columns, count: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    total = tl.zeros([block], dtype=tl.float32)
    for number in range(count):
        row = tl.load(indices + token * count + number).to(tl.int64)
        total += tl.load(rows + row * columns + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """out[t] = sum over j of rows[indices[t, j]].

    Args:
        rows: [R, H], contiguous, on a GPU, in any floating dtype but float64.
        indices: integers [T, k]; -1 adds nothing.

    Returns:
        [T, H] in the dtype of the rows; sums are added in fp32, in the order of j.
    """
    tokens, count = indices.shape
    columns = rows.shape[1]
    out = torch.empty(tokens, columns, dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(columns))
        grid = (tokens, triton.cdiv(columns, block))
        _sum_rows_kernel[grid](rows, indices.contiguous(), out, columns, count=count, block=block, num_warps=4)
    return out


@triton.jit
def _spread_rows_kernel(tokens, indices, out, columns, count: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    values = tl.load(tokens + token * columns + column, mask=inside)
    for number in range(count):
        row = tl.load(indices + token * count + number).to(tl.int64)
        tl.store(out + row * columns + column, values, mask=inside & (row >= 0))


def spread_rows(tokens: Tensor, indices: Tensor, total: int) -> Tensor:
    """out[indices[t, j]] = tokens[t], so that a token is read once, whatever the number of its rows.

    Args:
        tokens: [T, H], contiguous, on a GPU.
        indices: integers [T, k], which have each of 0 to `total` - 1 once; the others are -1.

    Returns:
        [total, H] in the dtype of the tokens.
    """
    count, columns = indices.shape[1], tokens.shape[1]
    out = torch.empty(total, columns, dtype=tokens.dtype, device=tokens.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(columns))
        grid = (tokens.shape[0], triton.cdiv(columns, block))
        _spread_rows_kernel[grid](tokens, indices.contiguous(), out, columns, count=count, block=block, num_warps=4)
    return out
