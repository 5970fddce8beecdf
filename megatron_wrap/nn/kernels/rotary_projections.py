"""Queries, keys and values of attention from their projections, rotated, in Triton. Import it only where Triton is
installed. Arithmetic is in fp32.

`latent_rotary`: from the up-projections of latent attention. It replaces splits, two rotations and concatenations, each
of which copies. A program processes one token. Of a projection's R rotary entries, (2i, 2i + 1) are a pair, which is
stored rotated at (i, i + R / 2). `cos` and `sin` are fp32 [S, R / 2].

`split_normalized_rotary`: from one projection, with the norms of queries and keys. It replaces a split, copies, two
norms and two rotations. A row is a head of a token. A program of the forward processes some rows; one of the backward
many, and it adds up their part of the norms' gradients. Nothing is rounded between norm and rotation."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.nn.kernels.rms_norm import PROGRAMS_PER_PROCESSOR, TILE_ELEMENTS, summed
from megatron_wrap.nn.kernels.rotary import cos_sin, load_parts, store_parts

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


@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """RMS norms of the heads of queries and keys.

    Args:
        query, key: weights [width].
        eps: added to the mean square.
        zero_centered: the weights are stored minus 1.
    """

    query: Tensor
    key: Tensor
    eps: float
    zero_centered: bool = False


@triton.jit
def _offsets(row, rows, groups, queries, width):
    """Token of each row, and its offset in the projection, in queries and in keys and values; masks of the rows that
    exist, and of those that are queries, keys and values."""
    heads = groups * (queries + 2)
    token, head = row // heads, row % heads
    group, role = head // (queries + 2), head % (queries + 2)
    valid, of_keys = row < rows, token.to(tl.int64) * groups + group
    begin, query, key = row.to(tl.int64) * width, (of_keys * queries + role) * width, of_keys * width
    is_q, is_k, is_v = valid & (role < queries), valid & (role == queries), valid & (role == queries + 1)
    return (
        token,
        begin[:, None],
        query[:, None],
        key[:, None],
        valid[:, None],
        is_q[:, None],
        is_k[:, None],
        is_v[:, None],
    )


@triton.jit
def _weights(gamma_q, gamma_k, entry, is_q, is_v, inside, zero_centered: tl.constexpr):
    """Norm weights of the rows, fp32 [rows, entries]; 1 for values."""
    of_q = tl.load(gamma_q + entry, mask=inside, other=0.0).to(tl.float32)
    of_k = tl.load(gamma_k + entry, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(is_q, of_q, of_k)
    if zero_centered:
        weight += 1.0
    return tl.where(is_v, 1.0, weight)


@triton.jit
def _angles(cos, sin, token, batch, half, pair, is_v, inside):
    """Cosines and sines [rows, pairs]; values are not rotated."""
    offset = (token // batch)[:, None] * half + pair
    rotated = inside & (is_v == 0)
    return tl.load(cos + offset, mask=rotated, other=1.0), tl.load(sin + offset, mask=rotated, other=0.0)


@triton.jit
def _entries(width, half, interleaved: tl.constexpr, pairs: tl.constexpr, others: tl.constexpr):
    """Pairs of a head, their first and second entries, and the entries that are not rotated; masks of the pairs and of
    those entries, whose numbers are rounded up to powers of two."""
    pair = tl.arange(0, pairs)[None, :]
    first = 2 * pair if interleaved else pair
    second = 2 * pair + 1 if interleaved else pair + half
    other = 2 * half + tl.arange(0, others)[None, :]
    return pair, first, second, other, pair < half, other < width


@triton.jit
def _normal(source, first, second, other, valid, is_v, in_pairs, in_rest, eps, width: tl.constexpr, half: tl.constexpr):
    """Entries of the rows divided by their root mean square, in fp32, and the factor; values are unchanged."""
    x = tl.load(source + first, mask=valid & in_pairs, other=0.0).to(tl.float32)
    y = tl.load(source + second, mask=valid & in_pairs, other=0.0).to(tl.float32)
    z = tl.zeros_like(valid).to(tl.float32)
    squares = tl.sum(x * x + y * y, axis=1)
    if width > 2 * half:
        z = tl.load(source + other, mask=valid & in_rest, other=0.0).to(tl.float32)
        squares += tl.sum(z * z, axis=1)
    inverse = tl.where(is_v, 1.0, (1.0 / tl.sqrt(squares / width + eps))[:, None])
    return x * inverse, y * inverse, z * inverse, inverse


@triton.jit
def _normalized_rotary_kernel(
    mixed,
    cos,
    sin,
    gamma_q,
    gamma_k,
    q,
    k,
    v,
    rows,
    batch,
    eps,
    groups: tl.constexpr,
    queries: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    zero_centered: tl.constexpr,
    tile: tl.constexpr,
    pairs: tl.constexpr,
    others: tl.constexpr,
):
    pair, first, second, other, in_pairs, in_rest = _entries(width, half, interleaved, pairs, others)
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    token, begin, query, key, valid, is_q, is_k, is_v = _offsets(row, rows, groups, queries, width)
    x, y, z, _ = _normal(mixed + begin, first, second, other, valid, is_v, in_pairs, in_rest, eps, width, half)
    x *= _weights(gamma_q, gamma_k, first, is_q, is_v, in_pairs, zero_centered)
    y *= _weights(gamma_q, gamma_k, second, is_q, is_v, in_pairs, zero_centered)
    c, s = _angles(cos, sin, token, batch, half, pair, is_v, valid & in_pairs)
    store_parts(q, k, v, query, key, first, is_q, is_k, is_v, in_pairs, x * c - y * s)
    store_parts(q, k, v, query, key, second, is_q, is_k, is_v, in_pairs, y * c + x * s)
    if width > 2 * half:
        z *= _weights(gamma_q, gamma_k, other, is_q, is_v, in_rest, zero_centered)
        store_parts(q, k, v, query, key, other, is_q, is_k, is_v, in_rest, z)


@triton.jit
def _added(of_q, of_k, product, is_q, is_k):
    """Both sums [tile, entries] plus the products of rows that are queries and of rows that are keys."""
    return of_q + tl.where(is_q, product, 0.0), of_k + tl.where(is_k, product, 0.0)


@triton.jit
def _store_sums(part, entry, inside, width, of_q, of_k):
    tl.store(part + entry, tl.sum(of_q, axis=0)[None, :], mask=inside)
    tl.store(part + width + entry, tl.sum(of_k, axis=0)[None, :], mask=inside)


@triton.jit
def _normalized_rotary_backward_kernel(
    mixed,
    q,
    k,
    v,
    cos,
    sin,
    gamma_q,
    gamma_k,
    rows,
    batch,
    eps,
    grad_mixed,
    parts,
    groups: tl.constexpr,
    queries: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    zero_centered: tl.constexpr,
    tile: tl.constexpr,
    pairs: tl.constexpr,
    others: tl.constexpr,
):
    """`q`, `k` and `v` are gradients; `parts` [programs, 2, width] are sums of those of the norms' weights."""
    pair, first, second, other, in_pairs, in_rest = _entries(width, half, interleaved, pairs, others)
    zeros = tl.zeros([tile, pairs], tl.float32)
    q_x, k_x, q_y, k_y = zeros, zeros, zeros, zeros
    q_z, k_z = tl.zeros([tile, others], tl.float32), tl.zeros([tile, others], tl.float32)
    for start in range(tl.program_id(0) * tile, rows, tl.num_programs(0) * tile):
        row = start + tl.arange(0, tile)
        token, begin, query, key, valid, is_q, is_k, is_v = _offsets(row, rows, groups, queries, width)
        x, y, z, inverse = _normal(
            mixed + begin, first, second, other, valid, is_v, in_pairs, in_rest, eps, width, half
        )
        u = load_parts(q, k, v, query, key, first, is_q, is_k, is_v, in_pairs)
        w = load_parts(q, k, v, query, key, second, is_q, is_k, is_v, in_pairs)
        c, s = _angles(cos, sin, token, batch, half, pair, is_v, valid & in_pairs)
        outer_x, outer_y = u * c + w * s, w * c - u * s
        q_x, k_x = _added(q_x, k_x, outer_x * x, is_q, is_k)
        q_y, k_y = _added(q_y, k_y, outer_y * y, is_q, is_k)
        outer_x *= _weights(gamma_q, gamma_k, first, is_q, is_v, in_pairs, zero_centered)
        outer_y *= _weights(gamma_q, gamma_k, second, is_q, is_v, in_pairs, zero_centered)
        share = tl.sum(outer_x * x + outer_y * y, axis=1)
        if width > 2 * half:
            outer_z = load_parts(q, k, v, query, key, other, is_q, is_k, is_v, in_rest)
            q_z, k_z = _added(q_z, k_z, outer_z * z, is_q, is_k)
            outer_z *= _weights(gamma_q, gamma_k, other, is_q, is_v, in_rest, zero_centered)
            share += tl.sum(outer_z * z, axis=1)
        share = tl.where(is_v, 0.0, share[:, None] / width)
        tl.store(grad_mixed + begin + first, (outer_x - x * share) * inverse, mask=valid & in_pairs)
        tl.store(grad_mixed + begin + second, (outer_y - y * share) * inverse, mask=valid & in_pairs)
        if width > 2 * half:
            tl.store(grad_mixed + begin + other, (outer_z - z * share) * inverse, mask=valid & in_rest)
    part = parts + tl.program_id(0).to(tl.int64) * 2 * width
    _store_sums(part, first, in_pairs, width, q_x, k_x)
    _store_sums(part, second, in_pairs, width, q_y, k_y)
    if width > 2 * half:
        _store_sums(part, other, in_rest, width, q_z, k_z)


def _sizes(width: int, half: int) -> dict[str, int]:
    """Compile-time sizes for heads of `width` entries, the first 2 * `half` of which are rotated."""
    block, others = triton.next_power_of_2(width), triton.next_power_of_2(max(1, width - 2 * half))
    tile = max(1, TILE_ELEMENTS // block)
    blocks = {"pairs": triton.next_power_of_2(half), "others": others, "tile": tile}
    return {"width": width, "half": half, **blocks, "num_warps": max(1, min(16, tile * block // 512))}


class _NormalizedRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        gamma_q: Tensor,
        gamma_k: Tensor,
        cos: Tensor,
        sin: Tensor,
        queries: int,
        interleaved: bool,
        eps: float,
        zero_centered: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed = mixed.contiguous()
        tokens, batch, groups, _ = mixed.shape
        width, half = gamma_q.shape[0], cos.shape[1]
        q = mixed.new_empty(tokens, batch, groups * queries, width)
        k, v = (mixed.new_empty(tokens, batch, groups, width) for _ in range(2))
        ctx.numbers = (mixed.numel() // width, batch, eps)
        ctx.constants = {
            "groups": groups,
            "queries": queries,
            "interleaved": interleaved,
            "zero_centered": zero_centered,
            **_sizes(width, half),
        }
        programs = triton.cdiv(ctx.numbers[0], ctx.constants["tile"])
        _normalized_rotary_kernel[(programs,)](
            mixed, cos, sin, gamma_q, gamma_k, q, k, v, *ctx.numbers, **ctx.constants
        )
        ctx.save_for_backward(mixed, gamma_q, gamma_k, cos, sin)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        mixed, gamma_q, gamma_k, cos, sin = ctx.saved_tensors
        q, k, v = (grad.contiguous() for grad in grad_outputs)
        rows, width = ctx.numbers[0], gamma_q.shape[0]
        tile = ctx.constants["tile"]
        processors = torch.cuda.get_device_properties(mixed.device).multi_processor_count
        programs = min(triton.cdiv(rows, tile), processors * PROGRAMS_PER_PROCESSOR[tile > 1])
        grad_mixed = torch.empty_like(mixed)
        parts = torch.empty(programs, 2 * width, dtype=torch.float32, device=mixed.device)
        _normalized_rotary_backward_kernel[(programs,)](
            mixed, q, k, v, cos, sin, gamma_q, gamma_k, *ctx.numbers, grad_mixed, parts, **ctx.constants
        )
        of_weights = summed(parts, gamma_q.dtype).split(width) if any(ctx.needs_input_grad[1:3]) else (None, None)
        return grad_mixed, *of_weights, None, None, None, None, None, None


def split_normalized_rotary(
    mixed: Tensor, norms: HeadNorms, angles: Tensor, queries: int, interleaved: bool = False, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotary.split_rotary` with heads of queries and keys that are normalized first.

    Args:
        mixed: [S, B, groups, (queries + 2) * width] on a GPU: for each group its queries, its key and its value.
        norms: norms whose weights have the width of a head.
        angles: as for `rotary.apply_rotary`.
        queries: query heads of a group.
        factor: factor of the rotated entries of queries and keys (YaRN); the same for all calls with these angles.

    Returns:
        [S, B, groups * queries, width], [S, B, groups, width] and [S, B, groups, width], each contiguous, in the dtype
        of `mixed`.
    """
    cos, sin = cos_sin(angles, interleaved, factor)
    return _NormalizedRotary.apply(
        mixed, norms.query, norms.key, cos, sin, queries, interleaved, norms.eps, norms.zero_centered
    )
