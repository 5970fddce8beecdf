"""The rows of experts in Triton. Their order: two kernels read the mask of the tokens' experts or their weights. Their
movement between tokens and experts, in both directions: each row is read and written once. Import it only where Triton
is installed."""

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
    block_tokens, block_counts, form = _order_form(groups, each)
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
def _order_form(groups: int, each: int) -> tuple[int, int, dict[str, int]]:
    """Tokens of a block, number of programs whose counts are read at once, and the kernels' compile-time arguments."""
    block_groups, block_each = triton.next_power_of_2(groups), triton.next_power_of_2(each)
    block_tokens = max(1, min(128, _BLOCK_ELEMENTS // (block_groups * block_each)))
    block_counts = max(1, min(_MOST_BLOCKS, _COUNTS // block_groups))
    sizes = {"block_tokens": block_tokens, "block_groups": block_groups, "block_each": block_each}
    return block_tokens, block_counts, {**sizes, "num_warps": 8}


_BLOCK = 1024
_WEIGHTS = 256
"""Weights that one program moves; at least those of one token."""


@triton.jit
def _sum_token(rows, indices, out, token, first, columns, count: tl.constexpr, block: tl.constexpr):
    column = first + tl.arange(0, block)
    inside = column < columns
    total = tl.zeros([block], dtype=tl.float32)
    for number in range(count):
        row = tl.load(indices + token * count + number).to(tl.int64)
        total += tl.load(rows + row * columns + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows_kernel(rows, indices, out, columns, count: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    _sum_token(rows, indices, out, token, tl.program_id(1) * block, columns, count, block)


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
def _spread_token(tokens, indices, out, token, first, columns, count: tl.constexpr, block: tl.constexpr):
    column = first + tl.arange(0, block)
    inside = column < columns
    values = tl.load(tokens + token * columns + column, mask=inside)
    for number in range(count):
        row = tl.load(indices + token * count + number).to(tl.int64)
        tl.store(out + row * columns + column, values, mask=inside & (row >= 0))


@triton.jit
def _spread_rows_kernel(tokens, indices, out, columns, count: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    _spread_token(tokens, indices, out, token, tl.program_id(1) * block, columns, count, block)


def spread_rows(tokens: Tensor, indices: Tensor, total: int) -> Tensor:
    """out[indices[t, j]] = tokens[t], so that a token is read once, whatever the number of its rows.

    Args:
        tokens: [T, H], contiguous, on a GPU.
        indices: integers [T, k], which contain each of 0 to `total` - 1 once; the others are -1.

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


@triton.jit
def _cells(
    indices,
    ends,
    first,
    tokens,
    groups,
    each,
    count: tl.constexpr,
    block_tokens: tl.constexpr,
    block_groups: tl.constexpr,
    block_each: tl.constexpr,
):
    """Masks and offsets of the weights [tokens, groups, each] from a first token on: which are inside, their offsets,
    which have a row, and their offsets in the rows' weights [R, each]."""
    token = first + tl.arange(0, block_tokens)
    group = tl.arange(0, block_groups)
    number = tl.arange(0, block_each)
    end = tl.load(ends + group, mask=group < groups, other=0)
    begin = tl.load(ends + group - 1, mask=(group > 0) & (group < groups), other=0)
    row = tl.full([block_tokens, block_groups], -1, tl.int32)
    source = indices + token.to(tl.int64) * count
    for position in range(count):
        of_token = tl.load(source + position, mask=token < tokens, other=-1).to(tl.int32)[:, None]
        row = tl.where((of_token >= begin[None, :]) & (of_token < end[None, :]), of_token, row)
    column = group[:, None] * each + number[None, :]
    is_column = (group < groups)[:, None] & (number < each)[None, :]
    inside = (token < tokens)[:, None, None] & is_column[None, :, :]
    offset = token.to(tl.int64)[:, None, None] * (groups * each) + column[None, :, :]
    has_row = inside & (row >= 0)[:, :, None]
    return inside, offset, has_row, row[:, :, None].to(tl.int64) * each + number[None, None, :]


@triton.jit(do_not_specialize=["count_tokens", "weight_programs"])
def _move_rows_kernel(
    values,
    weights,
    members,
    indices,
    ends,
    out,
    out_weights,
    count_tokens,
    weight_programs,
    columns,
    groups,
    each,
    to_rows: tl.constexpr,
    masked: tl.constexpr,
    count: tl.constexpr,
    block: tl.constexpr,
    block_tokens: tl.constexpr,
    block_groups: tl.constexpr,
    block_each: tl.constexpr,
):
    # Moves tokens to rows, or sums of rows to tokens
    program = tl.program_id(0)
    if program < weight_programs:
        first = program * block_tokens
        inside, of_token, has_row, of_row = _cells(
            indices, ends, first, count_tokens, groups, each, count, block_tokens, block_groups, block_each
        )
        is_read = has_row
        if masked:
            is_read = is_read & (tl.load(members + of_token, mask=has_row, other=0) != 0)
        if to_rows:
            tl.store(out_weights + of_row, tl.load(weights + of_token, mask=is_read, other=-1.0), mask=has_row)
        else:
            tl.store(out_weights + of_token, tl.load(weights + of_row, mask=is_read, other=0.0), mask=inside)
    else:
        of_values = program - weight_programs
        blocks = tl.cdiv(columns, block)
        token = (of_values // blocks).to(tl.int64)
        first_column = (of_values % blocks) * block
        if to_rows:
            _spread_token(values, indices, out, token, first_column, columns, count, block)
        else:
            _sum_token(values, indices, out, token, first_column, columns, count, block)


def spread_with_weights(
    tokens: Tensor, weights: Tensor, members: Tensor | None, indices: Tensor, ends: Tensor, groups: int, total: int
) -> tuple[Tensor, Tensor]:
    """`spread_rows` of tokens, and of the weights of each row's group, in one kernel.

    Args:
        tokens: [T, H], contiguous, on a GPU.
        weights: [T, G * n], contiguous.
        members: bool [T, G * n], contiguous; a weight is -1 where it is false. None: all are true.
        indices: int64 [T, k], contiguous, as for `spread_rows`.
        ends: int32, at least [G]; the first G are 1 + the index of each group's last row.
        groups: G.
        total: the number of rows (R).

    Returns:
        [R, H] and [R, n] in the dtypes of the tokens and the weights.
    """
    each = weights.shape[1] // groups
    out = torch.empty(total, tokens.shape[1], dtype=tokens.dtype, device=tokens.device)
    out_weights = torch.empty(total, each, dtype=weights.dtype, device=tokens.device)
    if total:
        grid, sizes, form = _launch(tokens.shape, indices.shape[1], groups, each)
        mask = weights if members is None else members.view(torch.uint8)
        _move_rows_kernel[grid](
            *(tokens, weights, mask, indices, ends, out, out_weights, *sizes),
            **{"to_rows": True, "masked": members is not None, **form},
        )
    return out, out_weights


def sum_with_weights(
    rows: Tensor, weights: Tensor, members: Tensor | None, indices: Tensor, ends: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """The adjoint of `spread_with_weights`: `sum_rows`, and the weights [T, G * n], 0 where they have no row or are no
    members, in one kernel.

    Args:
        rows: [R, H], contiguous, on a GPU, in any floating dtype but float64.
        weights: [R, n], contiguous.
        members, indices, ends, groups: as for `spread_with_weights`.
    """
    tokens, each = indices.shape[0], weights.shape[1]
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    out_weights = torch.empty(tokens, groups * each, dtype=weights.dtype, device=rows.device)
    if tokens:
        grid, sizes, form = _launch(out.shape, indices.shape[1], groups, each)
        mask = weights if members is None else members.view(torch.uint8)
        _move_rows_kernel[grid](
            *(rows, weights, mask, indices, ends, out, out_weights, *sizes),
            **{"to_rows": False, "masked": members is not None, **form},
        )
    return out, out_weights


def _launch(
    shape: torch.Size, count: int, groups: int, each: int
) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """Grid, sizes and compile-time arguments for tokens of a shape."""
    tokens, columns = shape
    form = _form(columns, count, groups, each)
    weight_programs = triton.cdiv(tokens, form["block_tokens"])
    programs = weight_programs + tokens * triton.cdiv(columns, form["block"])
    return (programs,), (tokens, weight_programs, columns, groups, each), form


@functools.cache
def _form(columns: int, count: int, groups: int, each: int) -> dict[str, int]:
    block_groups, block_each = triton.next_power_of_2(groups), triton.next_power_of_2(each)
    return {
        **{"count": count, "block": min(_BLOCK, triton.next_power_of_2(columns)), "num_warps": 4},
        **{"block_tokens": max(1, _WEIGHTS // (block_groups * block_each))},
        **{"block_groups": block_groups, "block_each": block_each},
    }
