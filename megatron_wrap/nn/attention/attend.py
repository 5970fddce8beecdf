"""Attention by torch's `scaled_dot_product_attention`, with grouped queries, sliding windows, masks and context
parallelism; and of packed rows by a kernel that takes the boundaries of the sequences."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_wrap.errors import LayoutError
from megatron_wrap.nn.attention.choice import attention_backend, needs_padded_values
from megatron_wrap.nn.attention.flash import (
    attention_with_sinks,
    flash_attention_with_sinks,
    has_flash_kernel,
)
from megatron_wrap.parallel.zigzag import chunks_of, merge

if TYPE_CHECKING:
    from megatron_wrap.nn.attention.packed_sequences import PackedSequences


# Minimum queries per block under a sliding window: smaller blocks waste less compute but launch more kernels.
_MIN_WINDOW_BLOCK = 512


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(query key^T * scale) value, with grouped-query attention: heads / groups query heads share a key head.

    Args:
        query: [s_q, b, heads, d]; the queries have the last s_q of the s_k positions.
        key: [s_k, b, groups, d].
        value: [s_k, b, groups, d_v].
        causal: a query attends its own and earlier positions.
        window: (left, right): a query attends at most so many positions before and after its own; negative: unlimited.
        mask: bool, broadcastable to [b, heads, s_q, s_k], True = masked, in addition to `causal` and `window`. The
            result of a query whose keys are all masked is finite but meaningless.
        dropout: dropout probability of the attention weights, with torch's generator of the device.
        sinks: [heads], a further score of each query, without a value; None: none.
        softcap: scores x become softcap * tanh(x / softcap), in a tensor of all scores; without sinks. None: unlimited.

    Returns:
        [s_q, b, heads, d_v].
    """
    is_plain = causal and mask is None and not dropout and query.shape[0] > 1
    if sinks is not None and is_plain and has_flash_kernel(query, value):
        return _flash_with_sinks(query, key, value, sinks, scale, -1 if window is None else window[0])
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    s_q, s_k = query.shape[2], key.shape[2]
    left, right = window if window is not None else (-1, -1)
    left = s_k if left < 0 else left
    right = 0 if causal else (s_k if right < 0 else right)
    call: Callable[..., Tensor] = functools.partial(_scaled_dot_product_attention, dropout_p=dropout, scale=scale)
    if sinks is not None:
        call = functools.partial(attention_with_sinks, sinks=sinks, dropout_p=dropout, scale=scale)
    elif softcap is not None:
        call = functools.partial(_with_capped_scores, cap=softcap, dropout_p=dropout, scale=scale)
    if mask is not None:
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (1, 1, s_q, s_k)))
    if left < s_k - 1 or (not causal and right < s_k - 1):
        output = _sliding_window(call, query, key, value, left, right, mask)
    elif mask is not None:
        masked = mask | _outside_window(s_q, s_k, left, right, mask.device) if causal else mask
        output = call(query, key, value, attn_mask=_sdpa_mask(masked))
    elif not causal or s_q == 1:
        output = call(query, key, value)
    elif s_q == s_k:
        output = call(query, key, value, is_causal=True)
    elif sinks is not None or softcap is not None:
        output = call(query, key, value, attn_mask=~_outside_window(s_q, s_k, left, right, query.device))
    else:
        # is_causal aligns the mask with the first key; the queries here are aligned with the last key.
        output = call(query, key, value, attn_mask=causal_lower_right(s_q, s_k))
    return output.permute(2, 0, 1, 3)


def _flash_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, left: int) -> Tensor:
    """Causal attention of tensors [s, b, heads, d] by the kernel for concatenated sequences."""
    (s_q, batch), s_k = query.shape[:2], key.shape[0]
    query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    output = flash_attention_with_sinks(
        query, key, value, starts * s_q, starts * s_k, s_q, s_k, sinks=sinks, scale=scale, window_size=(left, 0)
    )
    return output.unflatten(0, (batch, s_q)).transpose(0, 1)


def _scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **named: Any
) -> Tensor:
    """torch's function with grouped-query attention. On a GPU, its only fused kernel that takes a mask does not support
    groups, so keys and values are repeated; otherwise torch would use the implementation that stores all scores. With
    one query position, the query heads of a group are computed as positions, which needs no copy."""
    copies = query.shape[1] // key.shape[1]
    heads_share_mask = attn_mask is None or (type(attn_mask) is Tensor and attn_mask.shape[1] == 1)
    if copies > 1 and query.shape[2] == 1 and heads_share_mask:
        folded = query.reshape(query.shape[0], key.shape[1], copies, query.shape[3])
        output = F.scaled_dot_product_attention(folded, key, value, attn_mask=attn_mask, **named)
        return output.reshape(*query.shape[:3], value.shape[3])
    if copies > 1 and query.is_cuda and type(attn_mask) is Tensor:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        copies = 1
    fastest = (
        attention_backend(query, key, value, named["dropout_p"]) if attn_mask is None else contextlib.nullcontext()
    )
    with fastest:
        if not needs_padded_values(query, key, value, attn_mask, named["dropout_p"], named.get("is_causal", False)):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=attn_mask, enable_gqa=copies > 1, **named
            )
    width = value.shape[-1]
    padded = F.pad(value, (0, query.shape[-1] - width))  # adds columns of zeros to the output; the scale is `named`'s
    return _scaled_dot_product_attention(query, key, padded, attn_mask, **named)[..., :width]


def _with_capped_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    cap: float,
    scale: float,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """The counterpart of torch's function with grouped queries and scores capped before the mask (Gemma 2,
    arXiv:2408.00118, section 2)."""
    copies = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    scores = cap * torch.tanh(query @ key.transpose(2, 3) * (scale / cap))
    if is_causal:
        s_q, s_k = scores.shape[2:]
        attn_mask = ~_outside_window(s_q, s_k, s_k, 0, query.device)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    precise = torch.promote_types(query.dtype, torch.float32)
    weights = F.dropout(scores.softmax(dim=-1, dtype=precise).to(query.dtype), dropout_p)
    return weights @ value


def _sliding_window(
    call: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, left: int, right: int, mask: Tensor | None
) -> Tensor:
    """Attention by blocks of queries, each with the keys in its window: O(s_q * window) compute and mask memory."""
    s_q, s_k = query.shape[2], key.shape[2]
    offset = s_k - s_q
    outputs = []
    block = max(min(left + right, s_k), _MIN_WINDOW_BLOCK)
    for start in range(0, s_q, block):
        stop = min(start + block, s_q)
        low, high = max(offset + start - left, 0), min(offset + stop + right, s_k)
        masked = _outside_window(stop - start, high - low, left, right, query.device, query_offset=offset + start - low)
        if mask is not None:
            masked = masked | mask[:, :, start:stop, low:high]
        outputs.append(
            call(query[:, :, start:stop], key[:, :, low:high], value[:, :, low:high], attn_mask=_sdpa_mask(masked))
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _outside_window(
    s_q: int, s_k: int, left: int, right: int, device: torch.device, query_offset: int | None = None
) -> Tensor:
    """Mask bool [s_q, s_k], True if the key is more than `left` positions before or `right` after the query."""
    offset = s_k - s_q if query_offset is None else query_offset
    distance = torch.arange(s_k, device=device) - (torch.arange(s_q, device=device) + offset)[:, None]
    return (distance < -left) | (distance > right)


def _sdpa_mask(masked: Tensor) -> Tensor:
    """Convert Megatron-Core's convention (True = masked) to SDPA's (True = attend). Fully masked rows become unmasked,
    because they would give NaN gradients."""
    return ~masked | masked.all(dim=-1, keepdim=True)


def attend_over_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    cp_size: int,
    cp_rank: int,
    gather: Callable[[Tensor], Tensor],
    causal: bool,
    windowed: bool,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Attention within each of several consecutive documents, with or without context parallelism.

    Each rank has chunks r and 2 * cp_size - 1 - r of every document (`parallel/zigzag.py`) and gathers the keys and
    values of all ranks. A causal chunk of queries attends the keys up to the end of the chunk, so it needs no explicit
    mask and can use the fast kernels.

    Args:
        query: [s_local, b, heads, d], this rank's part of each document, concatenated.
        key: [s_local, b, groups, d].
        value: [s_local, b, groups, d_v].
        lengths: global length of each document, in tokens; multiples of 2 * cp_size if cp_size > 1.
        gather: differentiable all-gather in rank order along dimension 0, whose backward is a reduce-scatter.
        causal, windowed: whether `attend` is causal and has a sliding window.
        attend: (query, key, value) -> output; the last query has the position of the last key, as in `attend`.

    Returns:
        [s_local, b, heads, d_v].

    Raises:
        LayoutError: the lengths do not match the tensors or the ranks, or non-causal sliding-window attention with
            cp_size > 1.
    """
    if cp_size > 1 and not causal and windowed:
        raise LayoutError(f"context_parallel_size={cp_size} with a sliding window requires causal attention")
    uneven = [length for length in lengths if cp_size > 1 and length % (2 * cp_size)]
    if uneven or sum(lengths) != query.shape[0] * cp_size:
        raise LayoutError(
            f"documents of lengths {list(lengths)[:8]} do not match {query.shape[0]} tokens on each of {cp_size} "
            f"context-parallel ranks: the total length must be {query.shape[0] * cp_size}"
            + (f" and each length a multiple of {2 * cp_size}" if cp_size > 1 else "")
        )
    keys, values = (key,), (value,)
    if cp_size > 1:
        parts = gather(torch.cat((key, value), dim=-1)).chunk(cp_size)
        keys, values = zip(*(part.split((key.shape[-1], value.shape[-1]), dim=-1) for part in parts), strict=True)
    outputs, start = [], 0
    for length in lengths:
        stop = start + length // cp_size
        whole_key = merge([part[start:stop] for part in keys], dim=0)
        whole_value = merge([part[start:stop] for part in values], dim=0)
        chunks = chunks_of(cp_size, cp_rank)
        for chunk, piece in zip(chunks, query[start:stop].chunk(len(chunks)), strict=True):
            reach = (chunk + 1) * piece.shape[0] if causal else length
            outputs.append(attend(piece, whole_key[:reach], whole_value[:reach]))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scale: float,
    window: tuple[int, int] | None,
    gather: Callable[[Tensor], Tensor] | None,
    kernel: Callable[..., Tensor],
) -> Tensor:
    """Causal attention of this rank's queries, each within its own sequence.

    A context-parallel rank has two chunks of every sequence. It gathers the keys and values of all ranks and calls the
    kernel once for the first and once for the second chunks, whose last query has the position of the last key.

    Args:
        query: [t_local, 1, heads, d], in the order of `packed`.
        key: [t_local, 1, groups, d].
        value: [t_local, 1, groups, d_v], d_v <= d.
        packed: boundaries, on the same device.
        window: (left, right): a query attends at most `left` positions before its own; negative or None: all.
        gather: differentiable all-gather in rank order along dimension 0; None without context parallelism.
        kernel: from `varlen_kernel`, or a function with its arguments: (query, key, value [t, heads, d], cumulative
            numbers of queries and of keys int32 [N + 1], longest of each, scale, window_size) -> [t, heads, d].

    Returns:
        [t_local, 1, heads, d_v].
    """
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))  # the kernel needs heads of one size
    left = -1 if window is None else window[0]
    attend = functools.partial(kernel, scale=scale, window_size=(left, 0))
    query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
    if gather is None:
        cu_seqlens, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        output = attend(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
        return output[..., :width].unsqueeze(1)
    both = gather(torch.cat((key, value), dim=-1))
    outputs = []
    for half in packed.halves:
        keys, values = both.index_select(0, half.keys).split((key.shape[-1], value.shape[-1]), dim=-1)
        outputs.append(
            attend(
                query.index_select(0, half.queries),
                *(keys.contiguous(), values.contiguous()),
                *(half.cu_seqlens_q, half.cu_seqlens_k, half.longest_q, half.longest_k),
            )
        )
    assert packed.order is not None
    return torch.cat(outputs).index_select(0, packed.order)[..., :width].unsqueeze(1)
