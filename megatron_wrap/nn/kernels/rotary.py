"""The rotary position embedding in Triton: each kernel reads its input and writes its result once. Import it only where
Triton is installed.

A program processes one token; arithmetic is in fp32. `cos` and `sin` are fp32 [S, R / 2]: the first R of the D entries
of a head are R / 2 pairs, which are rotated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

MAX_HEADS = 64
"""Maximum number of heads in one iteration of a program."""


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
def load_parts(q, k, v, q_start, kv_start, offset, is_q, is_k, is_v, inside):
    """Load each head from the tensor of its kind: fp32 [heads, entries], 0 outside of all three."""
    value = tl.load(q + q_start + offset, mask=is_q & inside, other=0.0).to(tl.float32)
    value += tl.load(k + kv_start + offset, mask=is_k & inside, other=0.0).to(tl.float32)
    return value + tl.load(v + kv_start + offset, mask=is_v & inside, other=0.0).to(tl.float32)


@triton.jit
def store_parts(q, k, v, q_start, kv_start, offset, is_q, is_k, is_v, inside, value):
    """The inverse of `load_parts`."""
    value = value.to(q.dtype.element_ty)
    tl.store(q + q_start + offset, value, mask=is_q & inside)
    tl.store(k + kv_start + offset, value, mask=is_k & inside)
    tl.store(v + kv_start + offset, value, mask=is_v & inside)


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
        q_start = ((program * groups * queries + group * queries + role) * width)[:, None]
        kv_start = ((program * groups + group) * width)[:, None]
        cosine = tl.where(is_v, 1.0, c)
        sine = tl.where(is_v, 0.0, s)
        target = base + (head * width)[:, None]
        mask = valid[:, None] & inside
        if backward:
            x = load_parts(q, k, v, q_start, kv_start, first, is_q, is_k, is_v, inside)
            y = load_parts(q, k, v, q_start, kv_start, second, is_q, is_k, is_v, inside)
            tl.store(target + first, (x * cosine + y * sine).to(mixed.dtype.element_ty), mask=mask)
            tl.store(target + second, (y * cosine - x * sine).to(mixed.dtype.element_ty), mask=mask)
        else:
            x = tl.load(target + first, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(target + second, mask=mask, other=0.0).to(tl.float32)
            store_parts(q, k, v, q_start, kv_start, first, is_q, is_k, is_v, inside, x * cosine - y * sine)
            store_parts(q, k, v, q_start, kv_start, second, is_q, is_k, is_v, inside, y * cosine + x * sine)
        if rest > 0:
            other = (2 * half + tl.arange(0, rest))[None, :]
            within = other < width
            if backward:
                x = load_parts(q, k, v, q_start, kv_start, other, is_q, is_k, is_v, within)
                tl.store(target + other, x.to(mixed.dtype.element_ty), mask=valid[:, None] & within)
            else:
                x = tl.load(target + other, mask=valid[:, None] & within, other=0.0).to(tl.float32)
                store_parts(q, k, v, q_start, kv_start, other, is_q, is_k, is_v, within, x)


def _constants(width: int, half: int, heads: int) -> dict[str, int]:
    """Compile-time sizes of both kernels for heads of `width` entries, the first 2 * `half` of which are rotated."""
    rest = triton.next_power_of_2(width - 2 * half) if width > 2 * half else 0
    block = min(MAX_HEADS, triton.next_power_of_2(heads))
    return {"pairs": triton.next_power_of_2(half), "rest": rest, "block": block, "num_warps": 4}


def _rotate(tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False) -> Tensor:
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
        **_constants(width, half, heads),
    )
    return out


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
        **_constants(width, half, groups * (queries + 2)),
    )


_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def cos_sin(angles: Tensor, interleaved: bool, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the pairs' angles, times the factor, fp32 [S, R / 2] each. They are computed once for a
    tensor of angles, which the layers of a model share."""
    if angles not in _TABLES:
        flat = angles.detach().reshape(angles.shape[0], angles.shape[-1]).float()
        of_pairs = flat[:, ::2] if interleaved else flat[:, : flat.shape[1] // 2]
        cos, sin = of_pairs.cos(), of_pairs.sin()
        if factor != 1.0:  # in CUDA graphs each layer computes its tables
            cos, sin = cos * factor, sin * factor
        _TABLES[angles] = cos.contiguous(), sin.contiguous()
    return _TABLES[angles]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(_last_contiguous(tensor), cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = _last_contiguous(grad_outputs[0])
        return _rotate(grad, cos, sin, ctx.interleaved, inverse=True), None, None, None


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def apply_rotary(tensor: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of queries or keys.

    Args:
        tensor: [S, B, heads, D] on a GPU.
        angles: [S, 1, 1, R] in radians, R <= D, the two entries of a pair equal; the entries from R on are copied.
        interleaved: pairs are neighbours instead of entries i and i + R / 2.

    Returns:
        [S, B, heads, D] in the dtype of `tensor`; sines and cosines are fp32.
    """
    return _Rotary.apply(tensor, *cos_sin(angles, interleaved), interleaved)


class _SplitRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor, queries: int, width: int, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.queries, ctx.interleaved = queries, interleaved
        tokens, batch, groups, _ = mixed.shape
        query = mixed.new_empty(tokens, batch, groups * queries, width)
        key, value = (mixed.new_empty(tokens, batch, groups, width) for _ in range(2))
        _launch_split(mixed.contiguous(), query, key, value, cos, sin, queries, interleaved, backward=False)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        query, key, value = (grad.contiguous() for grad in grad_outputs)
        mixed = key.new_empty(*key.shape[:3], (ctx.queries + 2) * key.shape[3])
        _launch_split(mixed, query, key, value, cos, sin, ctx.queries, ctx.interleaved, backward=True)
        return mixed, None, None, None, None, None


def split_rotary(
    mixed: Tensor, angles: Tensor, queries: int, width: int, interleaved: bool = False, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one projection, with the rotary position embedding of the first two. The kernel
    replaces a split, a copy of the queries and two rotations, and in the backward their gradients and a concatenation.

    Args:
        mixed: [S, B, groups, (queries + 2) * width] on a GPU: for each group its queries, its key and its value.
        angles: as for `apply_rotary`.
        queries: query heads of a group.
        width: head size.
        factor: factor of the rotated entries of queries and keys (YaRN); the same for all calls with these angles.

    Returns:
        [S, B, groups * queries, width], [S, B, groups, width] and [S, B, groups, width], each contiguous.
    """
    return _SplitRotary.apply(mixed, *cos_sin(angles, interleaved, factor), queries, width, interleaved)
