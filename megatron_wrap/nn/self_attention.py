"""Self-attention that differs from Megatron-Core's: queries, keys and values from one kernel, norms over all heads, and
rotary angles by the kind of a layer. Import this module only after the platform is installed."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_wrap.nn.norm import RMSNorm
from megatron_wrap.platform.megatron_core.kernels import weight_of


class FusedSelfAttention(SelfAttention):
    """Megatron-Core's SelfAttention with one kernel in training and forward passes, which splits queries, keys and
    values, normalizes heads if they have RMS norms, and rotates. Unchanged with an inference context, or if
    tensor-parallel ranks share a key head."""

    _angles: Tensor | None = None

    def forward(
        self, *arguments: Any, rotary_pos_emb: Any = None, inference_context: Any = None, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """See the base class, which receives no angles if the projection's result is already rotated."""
        angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        shared = self.num_query_groups_per_partition * self.world_size != self.config.num_query_groups
        some_without = self.config.no_rope_freq  # layers without rotary embeddings
        if angles is None or shared or some_without or inference_context is not None:
            return super().forward(
                *arguments, rotary_pos_emb=rotary_pos_emb, inference_context=inference_context, **named
            )
        self._angles = angles
        try:
            return super().forward(*arguments, rotary_pos_emb=None, **named)
        finally:
            self._angles = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        """Query [s, b, heads, d], key and value [s, b, groups, d] of this rank."""
        if self._angles is None:
            return super().get_query_key_value_tensors(hidden_states, *arguments, **named)
        mixed, _ = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        interleaved, factor = self.config.rotary_interleaved, _yarn_get_concentration_factor_from_config(self.config)
        if not self.config.qk_layernorm:
            from megatron_wrap.nn.kernels.rotary import split_rotary

            width = self.hidden_size_per_attention_head
            return split_rotary(mixed, self._angles, queries, width, interleaved, factor)
        from megatron_wrap.nn.kernels.attention.normalized_rotary import HeadNorms, split_normalized_rotary

        norms = HeadNorms(
            query=weight_of(self.q_layernorm),
            key=weight_of(self.k_layernorm),
            eps=self.config.layernorm_epsilon,
            zero_centered=self.config.layernorm_zero_centered_gamma,
        )
        return split_normalized_rotary(mixed, norms, self._angles, queries, interleaved, factor)


class DecoderSelfAttention(SelfAttention):
    """Megatron-Core's SelfAttention with norms over all heads of a token, and with other rotary angles in layers with a
    window.

    Args:
        per_layer_norms: queries and keys are normalized over all heads. The config's `qk_layernorm` must then be false:
            Megatron-Core would add up the gradients of these norms over tensor-parallel ranks, as if each had a copy
            (distributed/finalize_model_grads.py).
        by_window: the angles have two halves, those of `RotaryByWindow`. The angles of layers with a window are not
            scaled, so their rotated parts are not multiplied by YaRN's attention factor.
    """

    def __init__(
        self, config: Any, *arguments: Any, per_layer_norms: bool = False, by_window: bool = False, **named: Any
    ) -> None:
        layer = named["layer_number"]
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer)
        self._half = int(has_window) if by_window else None
        unscaled = getattr(config, "without_yarn", None)
        super().__init__(unscaled() if self._half == 1 and unscaled else config, *arguments, **named)
        if per_layer_norms:
            width, epsilon, tp = self.hidden_size_per_attention_head, config.layernorm_epsilon, self.pg_collection.tp
            self.q_layernorm = HeadsRMSNorm(config, self.num_attention_heads_per_partition, width, epsilon, tp)
            self.k_layernorm = HeadsRMSNorm(config, self.num_query_groups_per_partition, width, epsilon, tp)

    def forward(self, *arguments: Any, rotary_pos_emb: Any = None, **named: Any) -> tuple[Tensor, Tensor]:
        """See the base class; it receives this layer's half of the angles."""
        if rotary_pos_emb is not None and self._half is not None:
            rotary_pos_emb = rotary_pos_emb.chunk(2, dim=-1)[self._half]
        return super().forward(*arguments, rotary_pos_emb=rotary_pos_emb, **named)


class HeadsRMSNorm(RMSNorm):
    """RMS norm over all heads of a token, which tensor-parallel ranks share: their sums of squares are added.

    Args:
        config: as for `RMSNorm`.
        heads, width: number of heads of this rank, and size of one.
        eps: added to the mean square.
        tp_group: the ranks that share the heads evenly.

    The weight [heads * width] is sharded like the heads.
    """

    def __init__(self, config: Any, heads: int, width: int, eps: float, tp_group: Any) -> None:
        super().__init__(config, heads * width, eps)
        self.tp_group = tp_group
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]  # a rank has its heads of all tokens
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [s, b, heads, width] -> the same shape in the parameters' dtype; computes in fp32."""
        if self.tp_group.size() == 1:
            return super().forward(x.flatten(-2)).view(x.shape)
        value, gamma, _ = self._to_common_dtype(x.flatten(-2).float())
        squares = reduce_from_tensor_model_parallel_region(value.square().sum(dim=-1, keepdim=True), self.tp_group)
        # each rank's output depends on the sum, so its gradient is the sum of the ranks'
        squares = copy_to_tensor_model_parallel_region(squares, self.tp_group)
        mean = squares / (math.prod(self.shape) * self.tp_group.size())
        normalized = value * torch.rsqrt(mean + self.eps) * gamma
        return normalized.to(self.weight.dtype).view(x.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight for a checkpoint, sharded over tensor-parallel ranks."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets, **groups
        )
        return sharded
