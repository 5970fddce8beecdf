"""Queries, keys and values of latent attention from its up-projections, in Triton. It replaces splits, two rotations
and concatenations, each of which copies. Import it only where Triton is installed.

A program processes one token; arithmetic is in fp32. Of a projection's R rotary entries, (2i, 2i + 1) are a pair, which
is stored rotated at (i, i + R / 2). `cos` and `sin` are fp32 [S, R / 2].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.nn.kernels.rotary import cos_sin

MAX_HEADS = 16
"""Maximum number of heads in one iteration of a program."""


@triton.jit
def _neighbours(entries, rows: tl.constexpr, pairs: tl.constexpr):
    """Two fp32 [rows, pairs]: the even and the odd columns, which are loaded together."""
    return tl.split(tl.reshape(entries.to(tl.float32), (rows, pairs, 2)))


@triton.jit
def _rotate(entries, half, c, s, mask, of_both, block: tl.constexpr, pairs: tl.constexpr):
    """Rotate [block, 2 * half] in place. The barrier is needed because other threads load the entries that a thread
    stores."""
    pair, both = tl.arange(0, pairs)[None, :], tl.arange(0, 2 * pairs)[None, :]
    x, y = _neighbours(tl.load(entries + both, mask=of_both, other=0.0), block, pairs)
    tl.debug_barrier()
    tl.store(entries + pair, (x * c - y * s).to(entries.dtype.element_ty), mask=mask)
    tl.store(entries + half + pair, (y * c + x * s).to(entries.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_back(entries, half, c, s, mask, of_both, pairs: tl.constexpr):
    """The inverse of `_rotate`."""
    pair, both = tl.arange(0, pairs)[None, :], tl.arange(0, 2 * pairs)[None, :]
    x = tl.load(entries + pair, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(entries + half + pair, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()
    tl.store(entries + both, tl.interleave(x * c + y * s, y * c - x * s).to(entries.dtype.element_ty), mask=of_both)


@triton.jit
def _copy(source, target, width, valid, block: tl.constexpr):
    entry = tl.arange(0, block)[None, :]
    mask = valid & (entry < width)
    tl.store(target + entry, tl.load(source + entry, mask=mask, other=0.0), mask=mask)


@triton.jit
def _latent_rotary_kernel(
    query,
    mixed,
    key,
    value,
    cos,
    sin,
    shared,
    backward: tl.constexpr,
    pairs: tl.constexpr,
    plain_block: tl.constexpr,
    value_block: tl.constexpr,
    block: tl.constexpr,
    shared_token_stride,
    shared_row_stride,
    batch,
    heads,
    plain,
    half,
    value_width,
):
    """In the backward pass all tensors are gradients, and the rotation is inverted."""
    program = tl.program_id(0).to(tl.int64)
    token, row = program // batch, program % batch
    pair, both = tl.arange(0, pairs)[None, :], tl.arange(0, 2 * pairs)[None, :]
    inside, in_both = pair < half, both < 2 * half
    c = tl.load(cos + token * half + pair, mask=inside, other=0.0)
    s = tl.load(sin + token * half + pair, mask=inside, other=0.0)
    to_shared = shared + token * shared_token_stride + row * shared_row_stride + both
    if backward:  # the sums over heads
        first, second = tl.zeros((block, pairs), tl.float32), tl.zeros((block, pairs), tl.float32)
    else:
        even, odd = _neighbours(tl.load(to_shared, mask=in_both, other=0.0), 1, pairs)
        first = tl.broadcast_to(even * c - odd * s, (block, pairs)).to(key.dtype.element_ty)
        second = tl.broadcast_to(odd * c + even * s, (block, pairs)).to(key.dtype.element_ty)
    for start in range(0, heads, block):
        head = (start + tl.arange(0, block))[:, None]
        valid, index = head < heads, program * heads + head
        to_query, to_key = query + index * (plain + 2 * half) + plain, key + index * (plain + 2 * half)
        to_mixed, to_value = mixed + index * (plain + value_width), value + index * value_width
        mask, of_both = valid & inside, valid & in_both
        if backward:
            _rotate_back(to_query, half, c, s, mask, of_both, pairs)
            first += tl.load(to_key + plain + pair, mask=mask, other=0.0).to(tl.float32)
            second += tl.load(to_key + plain + half + pair, mask=mask, other=0.0).to(tl.float32)
            _copy(to_key, to_mixed, plain, valid, plain_block)
            _copy(to_value, to_mixed + plain, value_width, valid, value_block)
        else:
            _rotate(to_query, half, c, s, mask, of_both, block, pairs)
            tl.store(to_key + plain + pair, first, mask=mask)
            tl.store(to_key + plain + half + pair, second, mask=mask)
            _copy(to_mixed, to_key, plain, valid, plain_block)
            _copy(to_mixed + plain, to_value, value_width, valid, value_block)
    if backward:
        x, y = tl.sum(first, axis=0, keep_dims=True), tl.sum(second, axis=0, keep_dims=True)
        tl.store(to_shared, tl.interleave(x * c + y * s, y * c - x * s).to(shared.dtype.element_ty), mask=in_both)


def _launch(
    query: Tensor, mixed: Tensor, key: Tensor, value: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    """Launch the kernel. All tensors are contiguous; of `shared` only the last dimension must be."""
    tokens, batch, heads, width = query.shape
    half = cos.shape[1]
    plain, value_width = width - 2 * half, value.shape[-1]
    _latent_rotary_kernel[(tokens * batch,)](
        *(query, mixed, key, value, cos, sin, shared),
        backward=backward,
        pairs=triton.next_power_of_2(half),
        plain_block=triton.next_power_of_2(plain),
        value_block=triton.next_power_of_2(value_width),
        block=min(MAX_HEADS, triton.next_power_of_2(heads)),
        shared_token_stride=shared.stride(0),
        shared_row_stride=shared.stride(1),
        batch=batch,
        heads=heads,
        plain=plain,
        half=half,
        value_width=value_width,
        num_warps=4,
    )


class _LatentRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, mixed: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, value_width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        query, mixed = query.contiguous(), mixed.contiguous()
        shared = shared if shared.stride(-1) == 1 else shared.contiguous()
        key, value = torch.empty_like(query), mixed.new_empty(*mixed.shape[:3], value_width)
        _launch(query, mixed, key, value, shared, cos, sin, backward=False)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        query, key, value = (grad.contiguous() for grad in grad_outputs)
        (tokens, batch, heads, width), rotated = query.shape, 2 * cos.shape[1]
        mixed = key.new_empty(tokens, batch, heads, width - rotated + value.shape[-1])
        shared = key.new_empty(tokens, batch, rotated)
        _launch(query, mixed, key, value, shared, cos, sin, backward=True)
        return query, mixed, shared, None, None, None


def latent_rotary(
    query: Tensor, mixed: Tensor, shared: Tensor, angles: Tensor, value_width: int, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1.3). Queries are rotated
    in place, and so is their gradient in the backward pass: the projection that made them and attention, which made
    the gradient, must not use these tensors afterwards.

    Args:
        query: [S, B, heads, P + R] on a GPU, the last R entries of a head not yet rotated.
        mixed: [S, B, heads, P + value_width]: for each head the part of its key without positions, then its value.
        shared: [S, B, R]: the rotary part of the key, the same for all heads, not yet rotated.
        angles: fp32 [at least S, 1, 1, R] in radians, its halves equal.
        value_width: size of a value head.
        factor: factor of the rotated entries (YaRN); the same for all calls with these angles.

    Returns:
        Queries and keys [S, B, heads, P + R] and values [S, B, heads, value_width], each contiguous.
    """
    return _LatentRotary.apply(query, mixed, shared, *cos_sin(angles, False, factor), value_width)
