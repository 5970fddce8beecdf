"""Self-attention whose queries, keys and values are split and rotated by one kernel. Import this module only after the
platform is installed."""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class FusedSelfAttention(SelfAttention):
    """Megatron-Core's SelfAttention with `kernels.rotary.split_rotary` in training and forward passes, for layers
    without query and key norms. Unchanged with an inference context, or if tensor-parallel ranks share a key head."""

    _angles: Tensor | None = None

    def forward(
        self, *arguments: Any, rotary_pos_emb: Any = None, inference_context: Any = None, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """As in the base class, which receives no angles if the projection's result is already rotated."""
        angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        shared = self.num_query_groups_per_partition * self.world_size != self.config.num_query_groups
        some_without = getattr(self.config, "no_rope_freq", None)  # layers without rotary embeddings
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
        from megatron_wrap.nn.kernels.rotary import split_rotary

        mixed, _ = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        return split_rotary(
            mixed,
            self._angles,
            queries,
            self.hidden_size_per_attention_head,
            self.config.rotary_interleaved,
            _yarn_get_concentration_factor_from_config(self.config),
        )
