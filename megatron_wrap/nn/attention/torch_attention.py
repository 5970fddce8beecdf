"""Core attention of the `torch` implementation, with the interface of Megatron-Core's `DotProductAttention`.

That class (`transformer/dot_product_attention.py`) supports neither context parallelism nor packed sequences nor
different head sizes of keys and values. This module imports Megatron-Core, so call `Platform.install` first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import layers, set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_wrap.errors import PlatformError
from megatron_wrap.nn.attention.attend import attend, attend_over_context, attend_packed
from megatron_wrap.nn.attention.choice import context_exchange, packed_kernel
from megatron_wrap.nn.attention.ring import attend_in_ring
from megatron_wrap.parallel.head_exchange import attention_inputs_by_heads, to_whole_heads
from megatron_wrap.parallel.zigzag import packed_positions

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_wrap.nn.attention.packed_sequences import PackedSequences


_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class TorchCoreAttention(MegatronModule):
    """Core attention for the layer spec; Megatron-Core builds it with the arguments of `DotProductAttention`.

    Args:
        config: Megatron-Core's; reads `kv_channels`, `window_size`, `window_attn_skip_freq`, `attention_dropout`,
            `softmax_type` and `sequence_parallel`.
        layer_number: 1-based; determines whether the layer has a sliding window.
        attn_mask_type: default for calls without a mask type.
        attention_dropout: overrides the config's.
        softmax_scale: factor of the scores; default 1 / sqrt(key head size).
        k_channels, v_channels: key and value head sizes, if different from the config's `kv_channels`.
        query_scaling: (beta, length): queries at position p are multiplied by 1 + beta ln(1 + floor(p / length)), p
            counted in each sequence; None: unscaled.
        softcap: scores x become softcap * tanh(x / softcap); None: unlimited.
        cp_comm_type: "a2a": context-parallel ranks exchange heads, and each attends over whole sequences; "p2p": keys
            and values pass around a ring, where `choice.ring_obstacle` allows it; otherwise ranks gather them.
        pg_collection: contains the context-parallel group `cp`; default: Megatron-Core's global one.

    With `softmax_type` learnable the module has a parameter `softmax_offset` [heads of this rank], the sinks of
    `flash.py`. Its name and dtype are those in Megatron-Core's class.
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
        query_scaling: tuple[float, int] | None = None,
        softcap: float | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        self.attn_mask_type = attn_mask_type
        self.query_scaling, self.softcap = query_scaling, softcap
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling has no effect in fp32: it divides the scores and multiplies them again.
        self.scale = (k_channels or config.kv_channels) ** -0.5 if softmax_scale is None else softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: tuple[int, int] | None = tuple(config.window_size) if has_window else None
        self.exchange = cp_comm_type
        self.tp_group = getattr(pg_collection, "tp", None)
        self.cp_group = getattr(pg_collection, "cp", None)
        if self.cp_group is None and config.context_parallel_size > 1:
            from megatron.core import parallel_state

            self.cp_group = parallel_state.get_context_parallel_group()
        self.softmax_offset = _softmax_offset(config)
        self.is_padding: Tensor | None = None
        """Mask of keys that are padding in every call, bool [b, slots], True = masked; None: no such keys. See
        `masked`."""
        self.current_max_attn_logits = None  # Megatron-Core's qk-clip reads it; not supported here

    @classmethod
    def masked(cls, attention: Any, is_padding: Tensor) -> TorchCoreAttention:
        """A replacement for the core attention of a layer that also masks padding in the KV cache.

        Args:
            attention: Megatron-Core's `SelfAttention` or `MLASelfAttention`.
            is_padding: bool [b, slots], True = masked; a call with s_k keys uses the first s_k columns.
        """
        replaced = attention.core_attention
        scale = (
            attention.softmax_scale if isinstance(attention, MultiLatentAttention) else attention.config.softmax_scale
        )
        core = cls(attention.config, attention.layer_number, AttnMaskType.causal, "self", softmax_scale=scale)
        core.cp_group, core.is_padding = replaced.cp_group, is_padding
        if isinstance(
            replaced, cls
        ):  # Transformer Engine's has other meanings for these names: its softcap 0.0 is none
            core.query_scaling, core.softcap = replaced.query_scaling, replaced.softcap
        if core.softmax_offset is not None:
            core.softmax_offset = replaced.softmax_offset
        return core.train(attention.training)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks for a checkpoint, as in Megatron-Core's class; other models have none."""
        state: dict[str, Any] = {}
        self._save_to_state_dict(state, "", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups
        )
        return sharded

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
        if self.query_scaling is not None:
            query = query * self._query_scale(query, key, packed_seq_params, cp_size).to(query.dtype)
        exchange = context_exchange(query, cp_size, self.exchange, self.window, self.dropout, self.softcap)
        with self._random_state():
            if exchange == "a2a":
                lengths = (query.shape[0] * cp_size,) if packed_seq_params is None else packed_seq_params.lengths
                inputs = attention_inputs_by_heads(query, key, value, lengths, self.cp_group)
                whole = self._over_sequences(*inputs, packed_seq_params, causal, 1, mask)
                output = to_whole_heads(whole, lengths, self.cp_group)
            elif exchange == "p2p":
                ring, sinks, packed = self.cp_group, self._sinks(query), packed_seq_params
                output = attend_in_ring(
                    query, key, value, ring, causal=causal, scale=self.scale, sinks=sinks, packed=packed
                )
            else:
                output = self._over_sequences(query, key, value, packed_seq_params, causal, cp_size, mask)
        return output.reshape(*output.shape[:-2], -1)

    def _random_state(self) -> contextlib.AbstractContextManager[None]:
        """Select the RNG state for dropout, which must differ over tensor-parallel ranks because their heads differ.
        With sequence parallelism, the caller has already selected it."""
        if self.dropout == 0.0 or not self.training or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()

    def _query_scale(self, query: Tensor, key: Tensor, packed: PackedSequences | None, cp_size: int) -> Tensor:
        """Factor of each query, fp32 [s, b or 1, 1, 1], as transformers' get_llama_4_attn_scale
        (modeling_ministral3.py)."""
        assert self.query_scaling is not None
        beta, length = self.query_scaling
        if packed is not None:
            positions = packed.positions[:, None]
        elif cp_size > 1:
            assert self.cp_group is not None
            positions = packed_positions([query.shape[0] * cp_size], cp_size, self.cp_group.rank())[:, None]
        else:  # with a KV cache, the queries are at the last positions
            positions = torch.arange(key.shape[0] - query.shape[0], key.shape[0])[:, None]
        positions = positions.to(query.device)
        if self.is_padding is not None:
            positions = (positions - self.is_padding.sum(dim=1)).clamp(min=0)
        return (1 + beta * torch.log(1 + torch.floor(positions / length)))[:, :, None, None]

    def _sinks(self, query: Tensor) -> Tensor | None:
        """Sinks of the query's heads, [heads]; after an exchange of heads, these are a share of this tensor-parallel
        rank's heads. None: there are no sinks."""
        heads = query.shape[-2]
        if self.config.softmax_type == "off-by-one":
            return query.new_zeros(heads)
        if self.softmax_offset is None or heads == self.softmax_offset.shape[0]:
            return self.softmax_offset
        assert self.cp_group is not None
        return self.softmax_offset.split(heads)[self.cp_group.rank()]

    def _gather(self, tensor: Tensor) -> Tensor:
        return tensor_parallel.gather_from_sequence_parallel_region(
            tensor, tensor_parallel_output_grad=True, group=self.cp_group
        )

    def _over_sequences(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSequences | None,
        causal: bool,
        cp_size: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Attention of `cp_size` ranks that have a share of each sequence; 1: the tensors have whole sequences."""
        if packed is not None:
            return self._packed(query, key, value, packed, causal, cp_size)
        return self._over_context(query, key, value, [query.shape[0] * cp_size], causal, cp_size, mask)

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
            sinks=self._sinks(query),
            softcap=self.softcap,
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
        dropout = self.dropout if self.training else 0.0
        kernel = packed_kernel(query, self._sinks(query), causal=causal, dropout=dropout, softcap=self.softcap)
        if kernel is None:  # one sequence at a time; the lengths are known on the host
            return self._over_context(query, key, value, packed.lengths, causal, cp_size)
        gather = self._gather if cp_size > 1 else None
        return attend_packed(query, key, value, packed, self.scale, self.window, gather, kernel)


def _softmax_offset(config: TransformerConfig) -> torch.nn.Parameter | None:
    if config.softmax_type != "learnable":
        return None
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    # on the device of Megatron-Core's linear layers; on CPUs its modules see another torch (platform/cpu)
    device = layers.torch.cuda.current_device()
    sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks
