"""The order of the experts' rows in Triton: two kernels, which read the mask of the tokens' experts or their weights.
Import it only where Triton is installed."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ELEMENTS = 2048
"""Elements of the mask in one block, which a program keeps in registers as integers."""
_COUNTS = 4096
"""Counts of rows that a program reads at once."""
_MOST_BLOCKS = 128
"""Maximum number of programs of a kernel, about as many as a GPU runs at a time; each reads the counts of all."""


@triton.jit
def _load_block(
    members,
    first,
    tokens,
    groups,
    each,
    by_sign: tl.constexpr,
    block_tokens: tl.constexpr,
    block_groups: tl.constexpr,
    block_each: tl.constexpr,
):
    """Token indices from `first` on, and the tokens' number of members of each group, int32 [tokens, groups]."""
    token = first + tl.arange(0, block_tokens)
    group = tl.arange(0, block_groups)
    number = tl.arange(0, block_each)
    column = group[:, None] * each + number[None, :]
    is_column = (group < groups)[:, None] & (number < each)[None, :]
    inside = (token < tokens)[:, None, None] & is_column[None, :, :]
    cell = token.to(tl.int64)[:, None, None] * (groups * each) + column[None, :, :]
    if by_sign:
        is_negative = tl.load(members + cell, mask=inside, other=-1.0).to(tl.float32) < 0.0
        is_member = inside & (is_negative == 0)  # true of a value that is not a number
    else:
        is_member = tl.load(members + cell, mask=inside, other=0) != 0
    return token, tl.sum(is_member.to(tl.int32), axis=2)


@triton.jit(do_not_specialize=["tokens", "parts"])
def _count_rows_kernel(
    members,
    counts,
    tokens,
    parts,
    groups,
    each,
    by_sign: tl.constexpr,
    block_tokens: tl.constexpr,
    block_groups: tl.constexpr,
    block_each: tl.constexpr,
):
    group = tl.arange(0, block_groups)
    rows = tl.zeros([block_groups], dtype=tl.int32)
    all_members = tl.zeros([block_groups], dtype=tl.int32)
    first = tl.program_id(0) * parts * block_tokens
    for part in range(parts):
        _token, count = _load_block(
            members, first + part * block_tokens, tokens, groups, each, by_sign, block_tokens, block_groups, block_each
        )
        rows += tl.sum((count > 0).to(tl.int32), axis=0)
        all_members += tl.sum(count, axis=0)
    target = counts + group * tl.num_programs(0) + tl.program_id(0)
    tl.store(target, rows, mask=group < groups)
    tl.store(target + groups * tl.num_programs(0), all_members, mask=group < groups)


@triton.jit
def _read_counts(counts, groups, block_groups: tl.constexpr, block_counts: tl.constexpr):
    """Counts for each group, int32 [groups] each: all rows, rows of earlier programs, and, in the first program, all
    members."""
    group = tl.arange(0, block_groups)
    blocks, this = tl.num_programs(0), tl.program_id(0)
    rows = tl.zeros([block_groups], dtype=tl.int32)
    before = tl.zeros([block_groups], dtype=tl.int32)
    all_members = tl.zeros([block_groups], dtype=tl.int32)
    for first in range(0, blocks, block_counts):
        block = first + tl.arange(0, block_counts)
        inside = (group < groups)[:, None] & (block < blocks)[None, :]
        source = counts + group[:, None] * blocks + block[None, :]
        count = tl.load(source, mask=inside, other=0)
        rows += tl.sum(count, axis=1)
        before += tl.sum(tl.where((block < this)[None, :], count, 0), axis=1)
        all_members += tl.sum(tl.load(source + groups * blocks, mask=inside & (this == 0), other=0), axis=1)
    return rows, before, all_members


@triton.jit(do_not_specialize=["tokens", "parts"])
def _order_rows_kernel(
    members,
    counts,
    rows_of_tokens,
    totals,
    tokens,
    parts,
    groups,
    each,
    width,
    by_sign: tl.constexpr,
    block_tokens: tl.constexpr,
    block_groups: tl.constexpr,
    block_each: tl.constexpr,
    block_counts: tl.constexpr,
    block_width: tl.constexpr,
):
    group = tl.arange(0, block_groups)
    rows, before, all_members = _read_counts(counts, groups, block_groups, block_counts)
    ends = tl.cumsum(rows, axis=0)
    is_written = (group < groups) & (tl.program_id(0) == 0)
    tl.store(totals + group, ends, mask=is_written)
    tl.store(totals + groups + group, rows, mask=is_written)
    tl.store(totals + 2 * groups + group, all_members, mask=is_written)
    begin = ends - rows + before
    number = tl.arange(0, block_width)
    first = tl.program_id(0) * parts * block_tokens
    for part in range(parts):
        token, count = _load_block(
            members, first + part * block_tokens, tokens, groups, each, by_sign, block_tokens, block_groups, block_each
        )
        chosen = (count > 0).to(tl.int32)
        row = begin[None, :] + tl.cumsum(chosen, axis=0) - chosen
        rank = tl.cumsum(chosen, axis=1) - chosen
        target = rows_of_tokens + token.to(tl.int64)[:, None] * width
        tl.store(target + rank, row.to(tl.int64), mask=(chosen > 0) & (rank < width))
        is_empty = (number[None, :] >= tl.sum(chosen, axis=1)[:, None]) & (number < width)[None, :]
        nothing = tl.full([block_tokens, block_width], -1, tl.int64)
        tl.store(target + number[None, :], nothing, mask=is_empty & (token < tokens)[:, None])
        begin += tl.sum(chosen, axis=0)


def order_rows(members: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
    """Number the rows of tokens by group, then by token.

    Args:
        members: [T, G * n] on a GPU, of bool or a floating dtype: a token has a row in a group if one of the group's n
            values is true, or not negative.
        groups: G.
        width: largest number of groups of a token.

    Returns:
        The rows of each token, int64 [T, `width`], in the order of their groups, then -1; and int32 [3, G]: 1 + the
        index of each group's last row, its number of rows, and the number of its values that are true, or not negative.
    """
    tokens, columns = members.shape
    each = columns // groups
    rows = torch.empty(tokens, width, dtype=torch.int64, device=members.device)
    if not rows.numel():
        return rows, torch.zeros(3, groups, dtype=torch.int32, device=members.device)
    block_tokens, block_counts, form = _form(groups, each)
    parts = triton.cdiv(triton.cdiv(tokens, block_tokens), _MOST_BLOCKS)
    blocks = triton.cdiv(tokens, block_tokens * parts)
    by_sign = members.is_floating_point()
    values = members.contiguous() if by_sign else members.contiguous().view(torch.uint8)
    counts = torch.empty(2 * groups * blocks, dtype=torch.int32, device=members.device)
    totals = torch.empty(3, groups, dtype=torch.int32, device=members.device)
    _count_rows_kernel[(blocks,)](values, counts, tokens, parts, groups, each, by_sign=by_sign, **form)
    _order_rows_kernel[(blocks,)](
        *(values, counts, rows, totals, tokens, parts, groups, each, width),
        by_sign=by_sign,
        block_counts=block_counts,
        block_width=triton.next_power_of_2(width),
        **form,
    )
    return rows, totals


@functools.cache
def _form(groups: int, each: int) -> tuple[int, int, dict[str, int]]:
    """Tokens of a block, number of programs whose counts are read at once, and the kernels' compile-time arguments."""
    block_groups, block_each = triton.next_power_of_2(groups), triton.next_power_of_2(each)
    block_tokens = max(1, min(128, _BLOCK_ELEMENTS // (block_groups * block_each)))
    block_counts = max(1, min(_MOST_BLOCKS, _COUNTS // block_groups))
    sizes = {"block_tokens": block_tokens, "block_groups": block_groups, "block_each": block_each}
    return block_tokens, block_counts, {**sizes, "num_warps": 8}
