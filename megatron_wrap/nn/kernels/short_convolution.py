"""The short causal convolution of linear attention in Triton, from rows of heads to queries, keys and values. Import it
only where Triton is installed.

The convolution reads its channels where they stand in the output of a projection and writes each part for itself, and
its backward pass writes the gradients of all parts into one tensor. Arithmetic is in fp32; the gradient before SiLU is
stored in the dtype of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ELEMENTS, _COLUMNS = 4096, 64
"""Of a block of tokens and channels. Each block of tokens writes its part of the weight's gradient."""
_CONVOLVED = 3
"""Parts with a convolution: queries, keys, values."""


@triton.jit
def _taps(x, weight, token, start, column_inside, stride, taps: tl.constexpr):
    # The convolution at each token; `x` points at a row's channels, `weight` at the first tap of each channel
    total = tl.zeros([token.shape[0], column_inside.shape[0]], dtype=tl.float32)
    for tap in tl.static_range(taps):
        earlier = token - (taps - 1) + tap
        seen = (earlier >= start)[:, None] & column_inside[None, :]
        value = tl.load(x[None, :] + earlier[:, None].to(tl.int64) * stride, mask=seen, other=0.0).to(tl.float32)
        factor = tl.load(weight + tap, mask=column_inside, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    return total


@triton.jit
def _forward_kernel(
    x,
    weight,
    starts,
    y,
    tokens,
    heads,
    token_stride,
    row_stride,
    head_stride: tl.constexpr,
    channels: tl.constexpr,
    first: tl.constexpr,
    width: tl.constexpr,
    taps: tl.constexpr,
    packed: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
):
    blocks: tl.constexpr = (width + block_columns - 1) // block_columns
    head, row = tl.program_id(1) // blocks, tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    column = (tl.program_id(1) % blocks) * block_columns + tl.arange(0, block_columns)
    inside, column_inside = token < tokens, column < width
    start = tl.zeros([block_tokens], dtype=tl.int32)
    if packed:
        start = tl.load(starts + token, mask=inside, other=0)
    start = tl.where(inside, start, token + 1)  # tokens after the row see nothing
    source = x + row * row_stride + head * head_stride + first + column
    total = _taps(
        source, weight + (head * channels + first + column) * taps, token, start, column_inside, token_stride, taps
    )
    value = total * tl.sigmoid(total)
    target = ((row * tokens + token) * heads + head)[:, None] * width + column[None, :]
    tl.store(y + target, value.to(y.dtype.element_ty), mask=inside[:, None] & column_inside[None, :])


@triton.jit
def _inner_gradient_kernel(
    x,
    weight,
    starts,
    grad_y,
    inner,
    grad_weight,
    tokens,
    heads,
    token_stride,
    row_stride,
    head_stride: tl.constexpr,
    channels: tl.constexpr,
    first: tl.constexpr,
    width: tl.constexpr,
    taps: tl.constexpr,
    packed: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
):
    # The gradient before SiLU, and of the weight a part for each block of tokens
    blocks: tl.constexpr = (width + block_columns - 1) // block_columns
    head, row = tl.program_id(1) // blocks, tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    column = (tl.program_id(1) % blocks) * block_columns + tl.arange(0, block_columns)
    inside, column_inside = token < tokens, column < width
    start = tl.zeros([block_tokens], dtype=tl.int32)
    if packed:
        start = tl.load(starts + token, mask=inside, other=0)
    start = tl.where(inside, start, token + 1)
    source = x + row * row_stride + head * head_stride + first + column
    channel = (head * channels + first + column) * taps
    before = _taps(source, weight + channel, token, start, column_inside, token_stride, taps)
    index = ((row * tokens + token) * heads + head)[:, None] * width + column[None, :]
    both = inside[:, None] & column_inside[None, :]
    grad = tl.load(grad_y + index, mask=both, other=0.0).to(tl.float32)
    gate = tl.sigmoid(before)
    grad *= gate * (1.0 + before * (1.0 - gate))
    tl.store(inner + index, grad.to(inner.dtype.element_ty), mask=both)
    part = grad_weight + (row * tl.num_programs(0) + tl.program_id(0)) * taps * heads * channels
    for tap in tl.static_range(taps):
        earlier = token - (taps - 1) + tap
        seen = (earlier >= start)[:, None] & column_inside[None, :]
        value = tl.load(source[None, :] + earlier[:, None].to(tl.int64) * token_stride, mask=seen, other=0.0)
        added = tl.sum(grad * value.to(tl.float32), axis=0)
        tl.store(part + (tap * heads + head) * channels + first + column, added, mask=column_inside)


@triton.jit
def _input_gradient_kernel(
    weight,
    starts,
    inner,
    grad_x,
    tokens,
    heads,
    token_stride,
    row_stride,
    head_stride: tl.constexpr,
    channels: tl.constexpr,
    first: tl.constexpr,
    width: tl.constexpr,
    taps: tl.constexpr,
    packed: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
):
    blocks: tl.constexpr = (width + block_columns - 1) // block_columns
    head, row = tl.program_id(1) // blocks, tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    column = (tl.program_id(1) % blocks) * block_columns + tl.arange(0, block_columns)
    column_inside = column < width
    taps_of_channels = weight + (head * channels + first + column) * taps
    total = tl.zeros([block_tokens, block_columns], dtype=tl.float32)
    for ahead in tl.static_range(taps):  # the token `ahead` positions later sees this one by tap `taps - 1 - ahead`
        later = token + ahead
        sees = later < tokens
        if packed:
            sees = sees & (tl.load(starts + later, mask=sees, other=0) <= token)
        index = ((row * tokens + later) * heads + head)[:, None] * width + column[None, :]
        grad = tl.load(inner + index, mask=sees[:, None] & column_inside[None, :], other=0.0).to(tl.float32)
        factor = tl.load(taps_of_channels + (taps - 1 - ahead), mask=column_inside, other=0.0).to(tl.float32)
        total += grad * factor[None, :]
    target = grad_x + row * row_stride + head * head_stride + first + column
    target = target[None, :] + token[:, None].to(tl.int64) * token_stride
    tl.store(target, total.to(grad_x.dtype.element_ty), mask=(token < tokens)[:, None] & column_inside[None, :])


@triton.jit
def _copy_kernel(
    rows,
    part,
    tokens,
    heads,
    token_stride,
    row_stride,
    head_stride: tl.constexpr,
    first: tl.constexpr,
    width: tl.constexpr,
    from_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    block_columns: tl.constexpr,
):
    blocks: tl.constexpr = (width + block_columns - 1) // block_columns
    head, row = tl.program_id(1) // blocks, tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    column = (tl.program_id(1) % blocks) * block_columns + tl.arange(0, block_columns)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    in_rows = rows + row * row_stride + head * head_stride + first
    in_rows = in_rows + token[:, None].to(tl.int64) * token_stride + column[None, :]
    in_part = part + ((row * tokens + token) * heads + head)[:, None] * width + column[None, :]
    if from_rows:
        tl.store(in_part, tl.load(in_rows, mask=inside), mask=inside)
    else:
        tl.store(in_rows, tl.load(in_part, mask=inside), mask=inside)


def _blocks(width: int) -> dict[str, int]:
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    return {"block_tokens": _ELEMENTS // columns, "block_columns": columns, "num_warps": 4}


def _grid(rows: Tensor, width: int, blocks: dict[str, int]) -> tuple[int, int, int]:
    tokens, batch, heads = rows.shape[:3]
    return (
        triton.cdiv(tokens, blocks["block_tokens"]),
        heads * triton.cdiv(width, blocks["block_columns"]),
        batch,
    )


def _ranges(widths: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    first = 0
    for width in widths:
        yield first, width
        first += width


def _copy(rows: Tensor, part: Tensor, first: int, from_rows: bool) -> None:
    """Between columns of the rows, [s, b, heads, W], and a contiguous [b, s, heads, width]."""
    width = part.shape[-1]
    blocks = _blocks(width)
    _copy_kernel[_grid(rows, width, blocks)](
        *(rows, part, rows.shape[0], rows.shape[2], rows.stride(0), rows.stride(1)),
        head_stride=rows.stride(2),
        first=first,
        width=width,
        from_rows=from_rows,
        **blocks,
    )


class _ConvolvedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, starts: Tensor | None, widths: tuple[int, ...]) -> Any:
        tokens, batch, heads = rows.shape[:3]
        parts = []
        for index, (first, width) in enumerate(_ranges(widths)):
            part = rows.new_empty(batch, tokens, heads, width)
            parts.append(part)
            if index >= _CONVOLVED:
                _copy(rows, part, first, from_rows=True)
                continue
            blocks = _blocks(width)
            _forward_kernel[_grid(rows, width, blocks)](
                *(rows, weight, starts if starts is not None else weight, part, tokens, heads),
                *(rows.stride(0), rows.stride(1)),
                head_stride=rows.stride(2),
                channels=sum(widths[:_CONVOLVED]),
                first=first,
                width=width,
                taps=weight.shape[1],
                packed=starts is not None,
                **blocks,
            )
        ctx.save_for_backward(rows, weight, starts)
        ctx.widths = widths
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_parts: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weight, starts = ctx.saved_tensors
        tokens, batch, heads = rows.shape[:3]
        grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        blocks = _blocks(max(ctx.widths[:_CONVOLVED]))
        programs = triton.cdiv(tokens, blocks["block_tokens"]) * batch
        grad_weight = torch.empty(programs, *weight.T.shape, dtype=torch.float32, device=rows.device)
        positions = starts if starts is not None else weight
        for index, (first, width) in enumerate(_ranges(ctx.widths)):
            grad_part = grad_parts[index].contiguous()
            if index >= _CONVOLVED:
                _copy(grad_rows, grad_part, first, from_rows=False)
                continue
            shape: dict[str, Any] = {
                "channels": sum(ctx.widths[:_CONVOLVED]),
                "first": first,
                "width": width,
                "taps": weight.shape[1],
                "packed": starts is not None,
                **blocks,
            }
            inner, grid = torch.empty_like(grad_part), _grid(rows, width, blocks)
            _inner_gradient_kernel[grid](
                *(rows, weight, positions, grad_part, inner, grad_weight, tokens, heads),
                *(rows.stride(0), rows.stride(1)),
                head_stride=rows.stride(2),
                **shape,
            )
            _input_gradient_kernel[grid](
                *(weight, positions, inner, grad_rows, tokens, heads, grad_rows.stride(0), grad_rows.stride(1)),
                head_stride=grad_rows.stride(2),
                **shape,
            )
        return grad_rows, grad_weight.sum(dim=0).T.to(weight.dtype), None, None


def convolved_heads(
    rows: Tensor, weight: Tensor, widths: tuple[int, ...], starts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The columns of each head in parts, the first three after the causal convolution of
    `nn.linear_attention.convolution` with its SiLU.

    Args:
        rows: [s, b, heads, W] on a GPU, contiguous, W the sum of the widths; computed in fp32.
        weight: [heads * (sum of the first three widths), K], ordered by head.
        widths: of the parts.
        starts: int32 [s], for each token the position of the first token of its sequence, b = 1; None: 0.

    Returns:
        [b, s, heads, width] for each width, contiguous, in the dtype of the rows.
    """
    return _ConvolvedHeads.apply(rows.contiguous(), weight.contiguous(), starts, widths)
