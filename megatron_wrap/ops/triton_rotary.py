"""Triton kernels of the rotary position embedding: each reads its input once and writes its result once.

Imported only for tensors on a GPU. A program processes one token; arithmetic is in fp32. `cos` and `sin` are fp32
[S, R / 2]: the first R of the D entries of a head are R / 2 pairs, which are rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_HEADS = 64
"""Heads in one iteration of a program."""


@triton.jit
def _rotary_kernel(
    tensor,
    cos,
    sin,
    out,
    batch,
    heads,
    width,
    half,
    token_stride,
    row_stride,
    head_stride,
    sign,
    interleaved: tl.constexpr,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    token, row = program // batch, program % batch
    pair = tl.arange(0, pairs)
    inside = (pair < half)[None, :]
    first = (2 * pair if interleaved else pair)[None, :]
    second = (2 * pair + 1 if interleaved else pair + half)[None, :]
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0)[None, :] * sign
    source = tensor + token * token_stride + row * row_stride
    target = out + program * heads * width
    for start in range(0, heads, block):
        head = (start + tl.arange(0, block))[:, None]
        mask = (head < heads) & inside
        x = tl.load(source + head * head_stride + first, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source + head * head_stride + second, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + head * width + first, (x * c - y * s).to(out.dtype.element_ty), mask=mask)
        tl.store(target + head * width + second, (y * c + x * s).to(out.dtype.element_ty), mask=mask)
        if rest > 0:
            other = (2 * half + tl.arange(0, rest))[None, :]
            mask = (head < heads) & (other < width)
            value = tl.load(source + head * head_stride + other, mask=mask, other=0.0)
            tl.store(target + head * width + other, value, mask=mask)


@triton.jit
def _load_parts(q, k, v, q_place, kv_place, offset, is_q, is_k, is_v, inside):
    value = tl.load(q + q_place + offset, mask=is_q & inside, other=0.0).to(tl.float32)
    value += tl.load(k + kv_place + offset, mask=is_k & inside, other=0.0).to(tl.float32)
    return value + tl.load(v + kv_place + offset, mask=is_v & inside, other=0.0).to(tl.float32)


@triton.jit
def _store_parts(q, k, v, q_place, kv_place, offset, is_q, is_k, is_v, inside, value):
    value = value.to(q.dtype.element_ty)
    tl.store(q + q_place + offset, value, mask=is_q & inside)
    tl.store(k + kv_place + offset, value, mask=is_k & inside)
    tl.store(v + kv_place + offset, value, mask=is_v & inside)


@triton.jit
def _split_rotary_kernel(
    mixed,
    q,
    k,
    v,
    cos,
    sin,
    batch,
    groups,
    queries,
    width,
    half,
    interleaved: tl.constexpr,
    backward: tl.constexpr,
    pairs: tl.constexpr,
    rest: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    token = program // batch
    pair = tl.arange(0, pairs)
    inside = (pair < half)[None, :]
    first = (2 * pair if interleaved else pair)[None, :]
    second = (2 * pair + 1 if interleaved else pair + half)[None, :]
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0)[None, :]
    heads = groups * (queries + 2)
    base = mixed + program * heads * width
    for start in range(0, heads, block):
        head = start + tl.arange(0, block)
        group, role = head // (queries + 2), head % (queries + 2)
        valid = head < heads
        is_q, is_k = (valid & (role < queries))[:, None], (valid & (role == queries))[:, None]
        is_v = (valid & (role == queries + 1))[:, None]
        q_place = ((program * groups * queries + group * queries + role) * width)[:, None]
        kv_place = ((program * groups + group) * width)[:, None]
        own_c = tl.where(is_v, 1.0, c)
        own_s = tl.where(is_v, 0.0, s)
        place = (head * width)[:, None]
        mask = valid[:, None] & inside
        if backward:
            x = _load_parts(q, k, v, q_place, kv_place, first, is_q, is_k, is_v, inside)
            y = _load_parts(q, k, v, q_place, kv_place, second, is_q, is_k, is_v, inside)
            tl.store(base + place + first, (x * own_c + y * own_s).to(mixed.dtype.element_ty), mask=mask)
            tl.store(base + place + second, (y * own_c - x * own_s).to(mixed.dtype.element_ty), mask=mask)
        else:
            x = tl.load(base + place + first, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(base + place + second, mask=mask, other=0.0).to(tl.float32)
            _store_parts(q, k, v, q_place, kv_place, first, is_q, is_k, is_v, inside, x * own_c - y * own_s)
            _store_parts(q, k, v, q_place, kv_place, second, is_q, is_k, is_v, inside, y * own_c + x * own_s)
        if rest > 0:
            other = (2 * half + tl.arange(0, rest))[None, :]
            within = other < width
            if backward:
                x = _load_parts(q, k, v, q_place, kv_place, other, is_q, is_k, is_v, within)
                tl.store(base + place + other, x.to(mixed.dtype.element_ty), mask=valid[:, None] & within)
            else:
                x = tl.load(base + place + other, mask=valid[:, None] & within, other=0.0).to(tl.float32)
                _store_parts(q, k, v, q_place, kv_place, other, is_q, is_k, is_v, within, x)


def _block(heads: int) -> int:
    return min(MAX_HEADS, triton.next_power_of_2(heads))


def rotate(tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False) -> Tensor:
    """Rotate the pairs of every head by the angles of its token.

    Args:
        tensor: [S, B, heads, D]; the last dimension is contiguous.
        interleaved: pairs are neighbours (2i, 2i + 1) instead of (i, i + R / 2).
        inverse: rotate by the negative angles: the backward.

    Returns:
        Contiguous [S, B, heads, D] in the dtype of `tensor`.
    """
    tokens, batch, heads, width = tensor.shape
    half = cos.shape[1]
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    _rotary_kernel[(tokens * batch,)](
        tensor,
        cos,
        sin,
        out,
        batch,
        heads,
        width,
        half,
        *tensor.stride()[:3],
        -1.0 if inverse else 1.0,
        interleaved=interleaved,
        pairs=triton.next_power_of_2(half),
        rest=triton.next_power_of_2(width - 2 * half) if width > 2 * half else 0,
        block=_block(heads),
        num_warps=4,
    )
    return out


def split_and_rotate(
    mixed: Tensor, cos: Tensor, sin: Tensor, queries: int, width: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a projection, the queries and keys rotated.

    Args:
        mixed: contiguous [S, B, groups, (queries + 2) * D]: of each group its queries, its key and its value.
        queries: heads of a group.
        width: D.

    Returns:
        Contiguous [S, B, groups * queries, D], [S, B, groups, D] and [S, B, groups, D].
    """
    tokens, batch, groups, _ = mixed.shape
    query = mixed.new_empty(tokens, batch, groups * queries, width)
    key, value = (mixed.new_empty(tokens, batch, groups, width) for _ in range(2))
    _launch_split(mixed, query, key, value, cos, sin, queries, interleaved, backward=False)
    return query, key, value


def merge_gradients(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, queries: int, interleaved: bool
) -> Tensor:
    """The backward of `split_and_rotate`: contiguous gradients of its results to that of `mixed`."""
    tokens, batch, groups, width = key.shape
    mixed = key.new_empty(tokens, batch, groups, (queries + 2) * width)
    _launch_split(mixed, query, key, value, cos, sin, queries, interleaved, backward=True)
    return mixed


def _launch_split(
    mixed: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: int,
    interleaved: bool,
    backward: bool,
) -> None:
    tokens, batch, groups, width = key.shape
    half = cos.shape[1]
    _split_rotary_kernel[(tokens * batch,)](
        mixed,
        query,
        key,
        value,
        cos,
        sin,
        batch,
        groups,
        queries,
        width,
        half,
        interleaved=interleaved,
        backward=backward,
        pairs=triton.next_power_of_2(half),
        rest=triton.next_power_of_2(width - 2 * half) if width > 2 * half else 0,
        block=_block(groups * (queries + 2)),
        num_warps=4,
    )
