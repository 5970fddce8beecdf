"""Core attention of the `torch` implementation: `scaled_dot_product_attention` behind Megatron-Core's interface.

It replaces `DotProductAttention` (`transformer/dot_product_attention.py`), which supports neither context parallelism
nor packed sequences nor different head sizes of keys and values. This module imports Megatron-Core, so call
`Platform.install` first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_wrap.errors import LayoutError, PlatformError
from megatron_wrap.ops.attention_backend import attention_backend
from megatron_wrap.ops.varlen import attend_packed, varlen_kernel
from megatron_wrap.parallel.context import chunks_of, merge

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_wrap.ops.packed import PackedSequences

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
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

    Returns:
        [s_q, b, heads, d_v].
    """
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    s_q, s_k = query.shape[2], key.shape[2]
    left, right = window if window is not None else (-1, -1)
    left = s_k if left < 0 else left
    right = 0 if causal else (s_k if right < 0 else right)
    call = functools.partial(_scaled_dot_product_attention, dropout_p=dropout, scale=scale)
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
    else:
        # is_causal aligns the mask with the first key; the queries here are aligned with the last key.
        output = call(query, key, value, attn_mask=causal_lower_right(s_q, s_k))
    return output.permute(2, 0, 1, 3)


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
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, enable_gqa=copies > 1, **named)


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
    """bool [s_q, s_k], True if the key is more than `left` positions before or `right` after the query."""
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

    Each rank has chunks r and 2 * cp_size - 1 - r of every document (`parallel/context.py`) and gathers the keys and
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


class TorchCoreAttention(MegatronModule):
    """Core attention for the layer spec; Megatron-Core builds it with the arguments of `DotProductAttention`.

    Args:
        config: Megatron-Core's; reads `kv_channels`, `window_size`, `window_attn_skip_freq`, `attention_dropout`,
            `softmax_type` and `sequence_parallel`.
        layer_number: 1-based; determines whether the layer has a sliding window.
        attn_mask_type: default for calls without one.
        attention_dropout: overrides the config's.
        softmax_scale: factor of the scores; default 1 / sqrt(key head size).
        k_channels, v_channels: key and value head sizes, if different from the config's `kv_channels`.
        cp_comm_type: ignored: keys and values are always all-gathered.
        pg_collection: contains the context-parallel group `cp`; default: Megatron-Core's global one.

    Raises:
        PlatformError: `softmax_type` is not vanilla.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        if config.softmax_type != "vanilla":
            raise PlatformError(
                f"softmax_type={config.softmax_type!r} needs Transformer Engine's attention; set it to 'vanilla'"
            )
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling has no effect in fp32: it divides the scores and multiplies them again.
        self.scale = (k_channels or config.kv_channels) ** -0.5 if softmax_scale is None else softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: tuple[int, int] | None = tuple(config.window_size) if has_window else None
        self.cp_group = getattr(pg_collection, "cp", None)
        if self.cp_group is None and config.context_parallel_size > 1:
            from megatron.core import parallel_state

            self.cp_group = parallel_state.get_context_parallel_group()
        self.is_padding: Tensor | None = None
        """bool [b, slots], True = padding: keys that are masked in every call; see `masked`."""
        self.current_max_attn_logits = None  # Megatron-Core's qk-clip reads it; not supported here

    @classmethod
    def masked(cls, attention: Any, is_padding: Tensor) -> TorchCoreAttention:
        """A replacement for the core attention of a layer that also masks padding in the KV cache.

        Args:
            attention: Megatron-Core's `SelfAttention` or `MLASelfAttention`.
            is_padding: bool [b, slots], True = masked; a call with s_k keys uses the first s_k columns.
        """
        scale = getattr(attention, "softmax_scale", attention.config.softmax_scale)
        core = cls(attention.config, attention.layer_number, AttnMaskType.causal, "self", softmax_scale=scale)
        core.cp_group, core.is_padding = attention.core_attention.cp_group, is_padding
        return core.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Attention of this rank's query heads.

        Args:
            query: [s, b, heads, d]; [t, 1, heads, d] for a packed row. All tensors are local to the tensor- and
                context-parallel rank.
            key: [s_k, b, groups, d].
            value: [s_k, b, groups, d_v].
            attention_mask: bool, broadcastable to [b, 1, s, s_k], True = masked (Megatron-Core's convention), in
                addition to the mask type; None with a causal type is fastest.
            packed_seq_params: the sequences of a packed row, which cover all tokens; None: one sequence in each row.

        Returns:
            [s, b, heads * d_v].

        Raises:
            PlatformError: an attention bias, or an explicit mask with packed sequences or context parallelism.
            LayoutError: the documents do not match the tokens or the ranks.
        """
        if attention_bias is not None:
            raise PlatformError("attention_bias needs Transformer Engine's attention")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal = mask_type in _CAUSAL
        mask = None if mask_type == AttnMaskType.no_mask else attention_mask
        if self.is_padding is not None:
            padding = self.is_padding[:, None, None, : key.shape[0]]
            mask = padding if mask is None else mask | padding
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        if (cp_size > 1 or packed_seq_params is not None) and mask is not None:
            raise PlatformError(
                f"packed sequences and context_parallel_size={cp_size} do not support an explicit attention_mask; pass "
                "None (causal attention and documents need no mask) or set context_parallel_size to 1"
            )
        with self._random_state():
            if packed_seq_params is not None:
                output = self._packed(query, key, value, packed_seq_params, causal, cp_size)
            else:
                output = self._over_context(query, key, value, [query.shape[0] * cp_size], causal, cp_size, mask)
        return output.reshape(*output.shape[:-2], -1)

    def _random_state(self) -> contextlib.AbstractContextManager[None]:
        """Select the RNG state for dropout, which must differ over tensor-parallel ranks because their heads differ.
        With sequence parallelism, the caller has already selected it."""
        if self.dropout == 0.0 or not self.training or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()

    def _gather(self, tensor: Tensor) -> Tensor:
        return tensor_parallel.gather_from_sequence_parallel_region(
            tensor, tensor_parallel_output_grad=True, group=self.cp_group
        )

    def _over_context(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        causal: bool,
        cp_size: int,
        mask: Tensor | None = None,
    ) -> Tensor:
        attend_local = functools.partial(
            attend,
            causal=causal,
            scale=self.scale,
            window=self.window,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
        )
        if cp_size == 1 and len(lengths) == 1:
            return attend_local(query, key, value)  # with a KV cache there are more keys than queries
        return attend_over_context(
            query,
            key,
            value,
            lengths,
            cp_size=cp_size,
            cp_rank=0 if self.cp_group is None else self.cp_group.rank(),
            gather=self._gather,
            causal=causal,
            windowed=self.window is not None,
            attend=attend_local,
        )

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, causal: bool, cp_size: int
    ) -> Tensor:
        """Attention within each sequence of a packed row; arguments and result as in `attend` with b = 1."""
        kernel = varlen_kernel()
        half_precision = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
        has_dropout = self.dropout > 0.0 and self.training
        if kernel is None or not half_precision or has_dropout or not causal:
            # one sequence at a time; the lengths are known on the host
            return self._over_context(query, key, value, packed.lengths, causal, cp_size)
        gather = self._gather if cp_size > 1 else None
        return attend_packed(query, key, value, packed, self.scale, self.window, gather, kernel)
