"""The short causal convolution of linear attention in Triton, from rows of heads to queries, keys and values. Import it
only where Triton is installed.

The convolution reads its channels where they are in the output of a projection and writes each part for itself, and
its backward pass writes the gradients of all parts into one tensor. Arithmetic is in fp32; the gradient before SiLU is
stored in the dtype of the inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ELEMENTS, _COLUMNS = 4096, 64
"""Number of elements and maximum number of columns of a block of tokens and channels. Each block of tokens writes its
part of the weight's gradient."""
_CONVOLVED = 3
"""Number of parts with a convolution: queries, keys, values."""


class _Columns(NamedTuple):
    """The columns of a head that one launch processes, and the block of tokens and columns that one program
    processes."""

    row_width: int
    """Columns of a head in the rows, all parts together."""
    channels: int
    """Channels of a head in the weight, the convolved parts together."""
    first: int
    width: int
    taps: int
    """Number of taps of the convolution; 0: the part is copied."""
    packed: bool
    block_tokens: int
    block_columns: int


@triton.jit
def _block(columns: tl.constexpr):
    # The row, the head, the tokens and the columns of the part that this program processes
    blocks: tl.constexpr = (columns.width + columns.block_columns - 1) // columns.block_columns
    token = tl.program_id(0) * columns.block_tokens + tl.arange(0, columns.block_tokens)
    column = (tl.program_id(1) % blocks) * columns.block_columns + tl.arange(0, columns.block_columns)
    return tl.program_id(2).to(tl.int64), tl.program_id(1) // blocks, token, column


@triton.jit
def _head_of_row(rows, row, head, heads, columns: tl.constexpr):
    # Points at the part's first column in the row's first token; `rows` are [s, b, heads, row_width]
    return rows + row * (heads * columns.row_width) + head * columns.row_width + columns.first


@triton.jit
def _token_stride(heads, columns: tl.constexpr):
    # Elements between tokens of the rows; each token contains a row for each program on the grid's last axis
    return tl.num_programs(2) * (heads * columns.row_width)


@triton.jit
def _in_part(row, token, tokens, head, heads, column, columns: tl.constexpr):
    # Offsets into a contiguous [b, s, heads, width]
    return ((row * tokens + token) * heads + head)[:, None] * columns.width + column[None, :]


@triton.jit
def _first_seen(starts, token, tokens, columns: tl.constexpr):
    # The first token that each token sees; tokens after the row see none
    start = tl.zeros_like(token)
    if columns.packed:
        start = tl.load(starts + token, mask=token < tokens, other=0)
    return tl.where(token < tokens, start, token + 1)


@triton.jit
def _taps(source, weight, token, start, inside, stride, taps: tl.constexpr):
    # The convolution at each token; `source` points at a row's channels, `weight` at the first tap of each channel
    total = tl.zeros([token.shape[0], inside.shape[0]], dtype=tl.float32)
    for tap in tl.static_range(taps):
        earlier = token - (taps - 1) + tap
        seen = (earlier >= start)[:, None] & inside[None, :]
        value = tl.load(source[None, :] + earlier[:, None].to(tl.int64) * stride, mask=seen, other=0.0)
        factor = tl.load(weight + tap, mask=inside, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * factor[None, :]
    return total


@triton.jit
def _short_convolution_kernel(x, weight, starts, y, tokens, heads, columns: tl.constexpr):
    row, head, token, column = _block(columns)
    inside, start = column < columns.width, _first_seen(starts, token, tokens, columns)
    source = _head_of_row(x, row, head, heads, columns) + column
    weight += (head * columns.channels + columns.first + column) * columns.taps
    total = _taps(source, weight, token, start, inside, _token_stride(heads, columns), columns.taps)
    value = total * tl.sigmoid(total)
    target = y + _in_part(row, token, tokens, head, heads, column, columns)
    tl.store(target, value.to(y.dtype.element_ty), mask=(token < tokens)[:, None] & inside[None, :])


@triton.jit
def _short_convolution_inner_kernel(
    x, weight, starts, grad_y, inner, grad_weight, tokens, heads, columns: tl.constexpr
):
    # The gradient before SiLU, and the part of the weight's gradient for each block of tokens
    taps: tl.constexpr = columns.taps
    row, head, token, column = _block(columns)
    inside, start = column < columns.width, _first_seen(starts, token, tokens, columns)
    source = _head_of_row(x, row, head, heads, columns) + column
    weight += (head * columns.channels + columns.first + column) * taps
    before = _taps(source, weight, token, start, inside, _token_stride(heads, columns), taps)
    index = _in_part(row, token, tokens, head, heads, column, columns)
    both = (token < tokens)[:, None] & inside[None, :]
    grad = tl.load(grad_y + index, mask=both, other=0.0).to(tl.float32)
    gate = tl.sigmoid(before)
    grad *= gate * (1.0 + before * (1.0 - gate))
    tl.store(inner + index, grad.to(inner.dtype.element_ty), mask=both)
    program = row * tl.num_programs(0) + tl.program_id(0)
    grad_weight += program * taps * heads * columns.channels + columns.first + column
    for tap in tl.static_range(taps):
        earlier = token - (taps - 1) + tap
        seen = (earlier >= start)[:, None] & inside[None, :]
        offset = earlier[:, None].to(tl.int64) * _token_stride(heads, columns)
        value = tl.load(source[None, :] + offset, mask=seen, other=0.0)
        added = tl.sum(grad * value.to(tl.float32), axis=0)
        tl.store(grad_weight + (tap * heads + head) * columns.channels, added, mask=inside)


@triton.jit
def _short_convolution_input_kernel(weight, starts, inner, grad_x, tokens, heads, columns: tl.constexpr):
    taps: tl.constexpr = columns.taps
    row, head, token, column = _block(columns)
    inside = column < columns.width
    weight += (head * columns.channels + columns.first + column) * taps
    total = tl.zeros([token.shape[0], column.shape[0]], dtype=tl.float32)
    for ahead in tl.static_range(taps):  # sees this token by tap `taps - 1 - ahead`
        later = token + ahead
        sees = later < tokens
        if columns.packed:
            sees = sees & (tl.load(starts + later, mask=sees, other=0) <= token)
        index = _in_part(row, later, tokens, head, heads, column, columns)
        grad = tl.load(inner + index, mask=sees[:, None] & inside[None, :], other=0.0).to(tl.float32)
        factor = tl.load(weight + (taps - 1 - ahead), mask=inside, other=0.0).to(tl.float32)
        total += grad * factor[None, :]
    target = (_head_of_row(grad_x, row, head, heads, columns) + column)[None, :]
    target += token[:, None].to(tl.int64) * _token_stride(heads, columns)
    tl.store(target, total.to(grad_x.dtype.element_ty), mask=(token < tokens)[:, None] & inside[None, :])


@triton.jit
def _short_convolution_copy_kernel(rows, part, tokens, heads, columns: tl.constexpr, from_rows: tl.constexpr):
    row, head, token, column = _block(columns)
    inside = (token < tokens)[:, None] & (column < columns.width)[None, :]
    in_rows = _head_of_row(rows, row, head, heads, columns)
    in_rows += token[:, None].to(tl.int64) * _token_stride(heads, columns) + column[None, :]
    in_part = part + _in_part(row, token, tokens, head, heads, column, columns)
    if from_rows:
        tl.store(in_part, tl.load(in_rows, mask=inside), mask=inside)
    else:
        tl.store(in_rows, tl.load(in_part, mask=inside), mask=inside)


def _columns_of_parts(widths: tuple[int, ...], taps: int, packed: bool) -> list[_Columns]:
    """The convolved parts have the same blocks, so that each program writes to the gradients of all their weights."""
    convolved, result, first = widths[:_CONVOLVED], [], 0
    for index, width in enumerate(widths):
        is_convolved = index < _CONVOLVED
        block_columns = min(_COLUMNS, triton.next_power_of_2(max(convolved) if is_convolved else width))
        inputs = (taps, packed) if is_convolved else (0, False)
        result.append(
            _Columns(sum(widths), sum(convolved), first, width, *inputs, _ELEMENTS // block_columns, block_columns)
        )
        first += width
    return result


def _grid(rows: Tensor, columns: _Columns) -> tuple[int, int, int]:
    tokens, batch, heads = rows.shape[:3]
    blocks = triton.cdiv(columns.width, columns.block_columns)
    return triton.cdiv(tokens, columns.block_tokens), heads * blocks, batch


class _ConvolvedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, starts: Tensor | None, widths: tuple[int, ...]) -> Any:
        tokens, batch, heads = rows.shape[:3]
        ctx.columns = _columns_of_parts(widths, weight.shape[1], starts is not None)
        ctx.save_for_backward(rows, weight, starts)
        positions = starts if starts is not None else weight
        parts = []
        for columns in ctx.columns:
            part, grid = rows.new_empty(batch, tokens, heads, columns.width), _grid(rows, columns)
            if columns.taps:
                _short_convolution_kernel[grid](rows, weight, positions, part, tokens, heads, columns, num_warps=4)
            else:
                _short_convolution_copy_kernel[grid](rows, part, tokens, heads, columns, from_rows=True, num_warps=4)
            parts.append(part)
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_parts: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weight, starts = ctx.saved_tensors
        tokens, batch, heads = rows.shape[:3]
        grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        programs = triton.cdiv(tokens, ctx.columns[0].block_tokens) * batch
        grad_weight = torch.empty(programs, *weight.T.shape, dtype=torch.float32, device=rows.device)
        positions = starts if starts is not None else weight
        for columns, grad_part in zip(ctx.columns, grad_parts, strict=True):
            grad_part, grid = grad_part.contiguous(), _grid(rows, columns)
            shape = (tokens, heads, columns)
            if not columns.taps:
                _short_convolution_copy_kernel[grid](grad_rows, grad_part, *shape, from_rows=False, num_warps=4)
                continue
            inner = torch.empty_like(grad_part)
            _short_convolution_inner_kernel[grid](
                rows, weight, positions, grad_part, inner, grad_weight, *shape, num_warps=4
            )
            _short_convolution_input_kernel[grid](weight, positions, inner, grad_rows, *shape, num_warps=4)
        return grad_rows, grad_weight.sum(dim=0).T.to(weight.dtype), None, None


def convolved_heads(
    rows: Tensor, weight: Tensor, widths: tuple[int, ...], starts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The columns of each head in parts, the first three after the causal convolution of
    `nn.linear_attention.convolution` with its SiLU.

    Args:
        rows: [s, b, heads, W] on a GPU, contiguous, W the sum of the widths; computed in fp32.
        weight: [heads * (sum of the first three widths), K], ordered by head.
        widths: columns of each part.
        starts: int32 [s], for each token the position of the first token of its sequence, b = 1; None: each row is one
            sequence.

    Returns:
        [b, s, heads, width] for each width, contiguous, in the dtype of the rows.
    """
    return _ConvolvedHeads.apply(rows.contiguous(), weight.contiguous(), starts, widths)
