"""The order of the experts' rows in Triton: two kernels that read the mask of the tokens' experts, and a sum over its
blocks between them. Import it only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ELEMENTS = 2048
"""Of the mask, which a program keeps in registers as integers."""


@triton.jit
def _load_block(mask, tokens, groups, block_tokens: tl.constexpr, block_groups: tl.constexpr):
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    group = tl.arange(0, block_groups)
    inside = (token < tokens)[:, None] & (group < groups)[None, :]
    cell = token[:, None].to(tl.int64) * groups + group[None, :]
    chosen = tl.load(mask + cell, mask=inside, other=0).to(tl.int32)
    return token, group, cell, chosen


@triton.jit
def _count_kernel(mask, counts, tokens, groups, block_tokens: tl.constexpr, block_groups: tl.constexpr):
    _token, group, _cell, chosen = _load_block(mask, tokens, groups, block_tokens, block_groups)
    target = counts + group * tl.num_programs(0) + tl.program_id(0)
    tl.store(target, tl.sum(chosen, axis=0), mask=group < groups)


@triton.jit
def _order_kernel(
    mask,
    ends,
    tokens_of_rows,
    cells_of_rows,
    rows_of_tokens,
    ends_of_groups,
    tokens,
    groups,
    width,
    block_tokens: tl.constexpr,
    block_groups: tl.constexpr,
    block_width: tl.constexpr,
):
    token, group, cell, chosen = _load_block(mask, tokens, groups, block_tokens, block_groups)
    block = group * tl.num_programs(0) + tl.program_id(0)
    begin = tl.load(ends + block - 1, mask=(group < groups) & (block > 0), other=0)
    is_last = tl.program_id(0) == tl.num_programs(0) - 1
    tl.store(ends_of_groups + group, begin + tl.sum(chosen, axis=0), mask=(group < groups) & is_last)
    row = begin[None, :] + tl.cumsum(chosen, axis=0) - chosen
    rank = tl.cumsum(chosen, axis=1) - chosen
    first = token.to(tl.int64) * width
    is_row = chosen > 0
    tl.store(tokens_of_rows + row, token[:, None].to(tl.int64) + tl.zeros_like(cell), mask=is_row)
    tl.store(cells_of_rows + row, cell, mask=is_row)
    tl.store(rows_of_tokens + first[:, None] + rank, row.to(tl.int64), mask=is_row & (rank < width))
    number = tl.arange(0, block_width)
    is_empty = (number[None, :] >= tl.sum(chosen, axis=1)[:, None]) & (number < width)[None, :]
    nothing = tl.full([block_tokens, block_width], -1, tl.int64)
    tl.store(rows_of_tokens + first[:, None] + number[None, :], nothing, mask=is_empty & (token < tokens)[:, None])


def order_rows(mask: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers the chosen elements of a mask by group, then by token.

    Args:
        mask: bool [T, G] on a GPU.
        width: largest number of groups of a token.

    Returns:
        Of each row, in memory for T * `width` rows, its token and its element of the mask as T * G values, both int64;
        the numbers of each token's rows, int64 [T, width], in the order of their groups, then -1; and int32 [G], 1
        plus the number of each group's last row.
    """
    tokens, groups = mask.shape
    most = tokens * width
    of_rows = torch.empty(2, most, dtype=torch.int64, device=mask.device)
    rows = torch.empty(tokens, width, dtype=torch.int64, device=mask.device)
    if not most:
        return of_rows[0], of_rows[1], rows, torch.zeros(groups, dtype=torch.int32, device=mask.device)
    block_groups = triton.next_power_of_2(groups)
    block_tokens = max(1, min(128, _BLOCK_ELEMENTS // block_groups))
    blocks = triton.cdiv(tokens, block_tokens)
    sizes = {"block_tokens": block_tokens, "block_groups": block_groups, "num_warps": 4}
    counts = torch.empty(groups * blocks, dtype=torch.int32, device=mask.device)
    values = mask.contiguous().view(torch.uint8)
    _count_kernel[(blocks,)](values, counts, tokens, groups, **sizes)
    ends = counts.cumsum(0, dtype=torch.int32)
    ends_of_groups = torch.empty(groups, dtype=torch.int32, device=mask.device)
    block_width = triton.next_power_of_2(width)
    _order_kernel[(blocks,)](
        *(values, ends, of_rows[0], of_rows[1], rows, ends_of_groups, tokens, groups, width),
        block_width=block_width,
        **sizes,
    )
    return of_rows[0], of_rows[1], rows, ends_of_groups
