"""The gradient of embeddings in Triton, added to the tokens' rows of an fp32 buffer. Import it only where Triton is
installed.

The tokens are sorted by row and cut into parts of equal length. A program computes the sum of the tokens that one row
has in one part. It adds the sum to the buffer if these are all tokens of the row, else it stores it, and a second
kernel adds up the sums of a row's parts. So a row that most tokens have (padding; ids of other ranks, which are looked
up as 0 and have the gradient 0) does not become a long loop, and no sum depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 64
"""Tokens of a part."""
_TOKENS, _COLUMNS = 8, 1024
"""Tokens and columns of the block that a program loads at once; most rows have few tokens."""
_SUMS, _COLUMNS_OF_SUMS = 32, 256
"""Sums of parts, and their columns, that a program loads at once."""


@triton.jit
def _embedding_part_kernel(
    rows,
    order,
    grad,
    total,
    sums,
    tokens,
    num_rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    part: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
):
    begin = tl.program_id(0)
    row = tl.load(rows + begin)
    is_first = (begin == 0) | (tl.load(rows + begin - 1, mask=begin > 0, other=-1) != row)
    if (row >= 0) & (row < num_rows) & (is_first | (begin % part == 0)):
        index = begin // part
        limit = tl.minimum((index + 1) * part, tokens)
        neighbour = begin + tl.arange(0, part)
        same = tl.load(rows + neighbour, mask=neighbour < limit, other=-1) == row
        end = begin + tl.sum(same.to(tl.int32), axis=0)
        continues = tl.load(rows + end, mask=end < tokens, other=-1) == row
        column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
        inside = column < columns
        result = tl.zeros([block_columns], dtype=tl.float32)
        for start in range(begin, end, block_tokens):
            number = start + tl.arange(0, block_tokens)
            token = tl.load(order + number, mask=number < end, other=0)
            source = (token // inner) * outer_stride + (token % inner) * inner_stride
            both = (number < end)[:, None] & inside[None, :]
            values = tl.load(grad + source[:, None] + column[None, :], mask=both, other=0.0)
            result += tl.sum(values.to(tl.float32), axis=0)
        if is_first & (continues == 0):
            target = total + row.to(tl.int64) * columns + column
            tl.store(target, tl.load(target, mask=inside, other=0.0) + result, mask=inside)
        else:
            slot = 2 * index + (begin % part != 0).to(tl.int32)
            tl.store(sums + slot.to(tl.int64) * columns + column, result, mask=inside)


@triton.jit
def _embedding_border_kernel(
    rows,
    total,
    sums,
    parts,
    num_rows,
    columns,
    part: tl.constexpr,
    block_sums: tl.constexpr,
    block_columns: tl.constexpr,
):
    # Adds up the sums of the row that begins in this part and continues in the next one, if there is such a row
    index = tl.program_id(0)
    begin, end = index * part, (index + 1) * part
    row = tl.load(rows + end)
    first = tl.load(rows + begin)
    before = tl.load(rows + begin - 1, mask=begin > 0, other=-1)
    begins_here = (first != row) | (before != row)
    if (row >= 0) & (row < num_rows) & begins_here & (tl.load(rows + end - 1) == row):
        column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
        inside = column < columns
        slot = 2 * index + (first != row).to(tl.int32)
        result = tl.load(sums + slot.to(tl.int64) * columns + column, mask=inside, other=0.0)
        start = index + 1
        while tl.load(rows + start * part, mask=start < parts, other=-1) == row:
            number = start + tl.arange(0, block_sums)
            same = tl.load(rows + number * part, mask=number < parts, other=-1) == row
            source = sums + (2 * number).to(tl.int64)[:, None] * columns + column[None, :]
            result += tl.sum(tl.load(source, mask=same[:, None] & inside[None, :], other=0.0), axis=0)
            start += block_sums
        target = total + row.to(tl.int64) * columns + column
        tl.store(target, tl.load(target, mask=inside, other=0.0) + result, mask=inside)


def add_row_gradients(ids: Tensor, grad: Tensor, total: Tensor) -> None:
    """total[ids[i]] += grad[i] for all i, with sums in fp32; the same bits in every run, without waiting for the GPU.

    Args:
        ids: [B, S] or of another shape, on a GPU; an id outside of [0, V) adds nothing.
        grad: [*ids.shape, H].
        total: fp32 [V, H], contiguous.
    """
    tokens, (num_rows, columns) = ids.numel(), total.shape
    if not tokens:
        return
    if grad.dim() != 3 or grad.stride(2) != 1:  # a view [B, S, H] of [S, B, H] is read as it is
        grad = grad.reshape(1, tokens, columns).contiguous()
    rows, order = ids.reshape(-1).int().sort(stable=True)
    parts = triton.cdiv(tokens, _PART)
    sums = torch.empty(2 * parts, columns, dtype=torch.float32, device=grad.device)
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    _embedding_part_kernel[(tokens, triton.cdiv(columns, block))](
        *(rows, order, grad, total, sums, tokens, num_rows, columns, grad.shape[1], grad.stride(0), grad.stride(1)),
        part=_PART,
        block_tokens=_TOKENS,
        block_columns=block,
        num_warps=4,
    )
    if parts > 1:
        block = min(_COLUMNS_OF_SUMS, block)
        _embedding_border_kernel[(parts - 1, triton.cdiv(columns, block))](
            *(rows, total, sums, parts, num_rows, columns),
            part=_PART,
            block_sums=_SUMS,
            block_columns=block,
            num_warps=4,
        )
