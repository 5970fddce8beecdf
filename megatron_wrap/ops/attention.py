"""Core attention of the `torch` implementation: `scaled_dot_product_attention` behind Megatron-Core's interface.

It takes the place of `DotProductAttention` (`transformer/dot_product_attention.py`), which knows neither context
parallelism nor packed sequences nor values of another width than keys. Importing this imports Megatron-Core, so
`Platform.install` comes first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
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
from megatron_wrap.parallel.context import chunks_of, merge

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
# Queries at least this many at a time under a sliding window: smaller blocks waste less work but start more kernels.
_WINDOW_BLOCK = 512


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
    """softmax(query key^T * scale) value, each group of heads / groups query heads sharing one key and value head.

    Args:
        query: [s_q, b, heads, d]; the queries are the last s_q of the s_k positions.
        key: [s_k, b, groups, d].
        value: [s_k, b, groups, d_v].
        causal: a query attends its own position and those before.
        window: (left, right): a query attends at most so many positions before and after its own; negative: no bound.
        mask: bool, broadcastable to [b, heads, s_q, s_k], True = may not attend, on top of `causal` and `window`. A
            query that may attend nothing attends everything: its result is finite and means nothing.
        dropout: probability with which an attention weight becomes zero; torch's generator of the device decides.

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
        output = _windowed(call, query, key, value, left, right, mask)
    elif mask is not None:
        masked = mask | _outside(s_q, s_k, left, right, mask.device) if causal else mask
        output = call(query, key, value, attn_mask=_allowed(masked))
    elif not causal or s_q == 1:
        output = call(query, key, value)
    elif s_q == s_k:
        output = call(query, key, value, is_causal=True)
    else:
        # Flash kernels align a causal mask with the last key where torch's is_causal aligns it with the first.
        output = call(query, key, value, attn_mask=causal_lower_right(s_q, s_k))
    return output.permute(2, 0, 1, 3)


def _scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **named: Any
) -> Tensor:
    """torch's, with groups. Of its kernels on a GPU the one that takes a mask knows none: without copies of the keys
    torch would take the way that keeps all scores."""
    copies = query.shape[1] // key.shape[1]
    if copies > 1 and query.is_cuda and type(attn_mask) is Tensor:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        copies = 1
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, enable_gqa=copies > 1, **named)


def _windowed(
    call: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, left: int, right: int, mask: Tensor | None
) -> Tensor:
    """Blocks of queries against the keys that they reach, so work and masks grow with s_q * window, not s_q * s_k."""
    s_q, s_k = query.shape[2], key.shape[2]
    offset = s_k - s_q
    outputs = []
    block = max(min(left + right, s_k), _WINDOW_BLOCK)
    for start in range(0, s_q, block):
        stop = min(start + block, s_q)
        low, high = max(offset + start - left, 0), min(offset + stop + right, s_k)
        masked = _outside(stop - start, high - low, left, right, query.device, query_offset=offset + start - low)
        if mask is not None:
            masked = masked | mask[:, :, start:stop, low:high]
        outputs.append(
            call(query[:, :, start:stop], key[:, :, low:high], value[:, :, low:high], attn_mask=_allowed(masked))
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _outside(
    s_q: int, s_k: int, left: int, right: int, device: torch.device, query_offset: int | None = None
) -> Tensor:
    """bool [s_q, s_k], True where the key is more than `left` before or `right` after the query's position."""
    offset = s_k - s_q if query_offset is None else query_offset
    distance = torch.arange(s_k, device=device) - (torch.arange(s_q, device=device) + offset)[:, None]
    return (distance < -left) | (distance > right)


def _allowed(masked: Tensor) -> Tensor:
    """SDPA's convention (True = attends) from Megatron-Core's. A row without any key would give NaN gradients."""
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
    """Attention inside each of the documents that follow one another, cut over context-parallel ranks or whole.

    Each rank holds chunks r and 2 * cp_size - 1 - r of every document (`parallel/context.py`). It gathers the keys and
    values of all ranks; a causal chunk of queries then attends the keys up to its own end, so no explicit mask is
    needed and the fast kernels serve.

    Args:
        query: [s_local, b, heads, d], this rank's part of every document in turn.
        key: [s_local, b, groups, d].
        value: [s_local, b, groups, d_v].
        lengths: length of each whole document, in tokens; each a multiple of 2 * cp_size when cp_size > 1.
        gather: every rank's tensor in rank order along dimension 0; its backward reduce-scatters.
        causal, windowed: what `attend` does.
        attend: (query, key, value) -> output, aligned as the function `attend` is.

    Returns:
        [s_local, b, heads, d_v].

    Raises:
        LayoutError: the lengths do not fit the tensors or the ranks, or a window without causality over several ranks.
    """
    if cp_size > 1 and not causal and windowed:
        raise LayoutError(f"a sliding window needs causal attention with context_parallel_size={cp_size}")
    unfit = [length for length in lengths if cp_size > 1 and length % (2 * cp_size)]
    if unfit or sum(lengths) != query.shape[0] * cp_size:
        raise LayoutError(
            f"documents of lengths {list(lengths)[:8]} do not fit {query.shape[0]} tokens on each of {cp_size} "
            f"context-parallel ranks: together they must be {query.shape[0] * cp_size} tokens long"
            + (f" and each a multiple of {2 * cp_size}" if cp_size > 1 else "")
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


@functools.cache
def _packed_kernel() -> Callable[..., Tensor] | None:
    """torch's flash attention over packed sequences: takes what `varlen_attn` does; None where this torch has none."""
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    known = set(inspect.signature(kernel).parameters)
    if not {"scale", "window_size"} <= known:
        return None

    def call(query: Tensor, key: Tensor, value: Tensor, *marks: Any, **named: Any) -> Tensor:
        if query.shape[1] != key.shape[1]:
            if "enable_gqa" in known:
                named["enable_gqa"] = True
            else:  # an older torch: the copies cost memory, the kernel is the same
                key, value = (
                    tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value)
                )
        return kernel(query, key, value, *marks, **named)

    return call


class TorchCoreAttention(MegatronModule):
    """Core attention for the layer spec; Megatron-Core builds it with the arguments of `DotProductAttention`.

    Args:
        config: Megatron-Core's; `kv_channels`, `window_size`, `window_attn_skip_freq`, `attention_dropout`,
            `softmax_type` and `sequence_parallel` are read.
        layer_number: counted from 1; decides whether the layer has a sliding window.
        attn_mask_type: used where the call names none.
        attention_dropout: instead of the config's.
        softmax_scale: what the scores are multiplied by; default 1 / sqrt(width of a key).
        k_channels, v_channels: width of a key and of a value, when not the config's `kv_channels`.
        cp_comm_type: no effect: keys and values are always all-gathered.
        pg_collection: its `cp` group cuts the sequence; default Megatron-Core's global one.

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
        # apply_query_key_layer_scaling divides here and multiplies before the softmax: nothing is left of it in fp32.
        self.scale = (k_channels or config.kv_channels) ** -0.5 if softmax_scale is None else softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: tuple[int, int] | None = tuple(config.window_size) if has_window else None
        self.cp_group = getattr(pg_collection, "cp", None)
        if self.cp_group is None and config.context_parallel_size > 1:
            from megatron.core import parallel_state

            self.cp_group = parallel_state.get_context_parallel_group()
        self.no_token: Tensor | None = None
        """bool [b, slots], True = no token: keys that nothing attends, whatever a call says; see `masked`."""
        self.current_max_attn_logits = None  # read by Megatron-Core's qk-clip, which needs another implementation

    @classmethod
    def masked(cls, attention: Any, no_token: Tensor) -> TorchCoreAttention:
        """The core attention of an attention layer, whatever its own is, in which nothing attends some keys.

        Args:
            attention: Megatron-Core's `SelfAttention` or `MLASelfAttention`.
            no_token: bool [b, slots], True = may not be attended; of s_k keys the first s_k columns count.
        """
        scale = getattr(attention, "softmax_scale", attention.config.softmax_scale)
        made = cls(attention.config, attention.layer_number, AttnMaskType.causal, "self", softmax_scale=scale)
        made.cp_group, made.no_token = attention.core_attention.cp_group, no_token
        return made.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of this rank's query heads.

        Args:
            query: [s, b, heads, d], or [t, heads, d] for packed sequences; local to the tensor- and context-parallel
                rank, and so are the others.
            key: [s_k, b, groups, d] or [t, groups, d].
            value: [s_k, b, groups, d_v] or [t, groups, d_v].
            attention_mask: bool, broadcastable to [b, 1, s, s_k], True = may not attend (Megatron-Core's convention),
                on top of what the mask type says; None with a causal type is the fast way.
            packed_seq_params: with `qkv_format` "thd", documents between the marks of `cu_seqlens_q` (or of
                `cu_seqlens_q_padded`), which count whole documents and cover all tokens.

        Returns:
            [s, b, heads * d_v], or [t, heads * d_v].

        Raises:
            PlatformError: an attention bias, or an explicit mask with packed sequences or context parallelism.
            LayoutError: the documents do not fit the tokens or the ranks.
        """
        if attention_bias is not None:
            raise PlatformError("attention_bias needs Transformer Engine's attention")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal = mask_type in _CAUSAL
        mask = None if mask_type == AttnMaskType.no_mask else attention_mask
        if self.no_token is not None:
            unattended = self.no_token[:, None, None, : key.shape[0]]
            mask = unattended if mask is None else mask | unattended
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if (cp_size > 1 or packed) and mask is not None:
            raise PlatformError(
                f"packed sequences and context_parallel_size={cp_size} take attention without an explicit mask; pass "
                "None as attention_mask (causal attention and documents need none) or set context_parallel_size to 1"
            )
        with self._random_state():
            if packed_seq_params is not None and packed:
                output = self._packed(query, key, value, packed_seq_params, causal, cp_size)
            else:
                output = self._over_context(query, key, value, [query.shape[0] * cp_size], causal, cp_size, mask)
        return output.reshape(*output.shape[:-2], -1)

    def _random_state(self) -> contextlib.AbstractContextManager[None]:
        """Heads differ over tensor-parallel ranks, so must their dropout; sequence parallelism is in that state."""
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
        rule = functools.partial(
            attend,
            causal=causal,
            scale=self.scale,
            window=self.window,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
        )
        if cp_size == 1 and len(lengths) == 1:
            return rule(query, key, value)  # keys may be more than queries: a cache of earlier positions
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
            attend=rule,
        )

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, documents: PackedSeqParams, causal: bool, cp_size: int
    ) -> Tensor:
        marks = documents.cu_seqlens_q if documents.cu_seqlens_q_padded is None else documents.cu_seqlens_q_padded
        kernel = _packed_kernel()
        fast = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] == value.shape[-1]
        drops = self.dropout > 0.0 and self.training
        if kernel is not None and fast and cp_size == 1 and not drops and documents.max_seqlen_q is not None:
            left, right = self.window or (-1, -1)
            longest = int(documents.max_seqlen_q)
            return kernel(
                *(query, key, value, marks, marks, longest, longest),
                scale=self.scale,
                window_size=(left, 0 if causal else right),
            )
        # Reading the lengths waits for the GPU; the CPU, and packed sequences under context parallelism, take this way.
        lengths = [length for length in marks.diff().tolist() if length]
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return self._over_context(query, key, value, lengths, causal, cp_size).squeeze(1)
