"""Multi-latent attention (DeepSeek V2, arXiv:2405.04434), corrected where Megatron-Core differs from the published
models or between its versions. Import this module only after the platform is installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from megatron_wrap.nn.packed_sequences import PackedSequences, rotary_by_position


class LatentAttention(MLASelfAttention):
    """Uses the modules of the layer spec in all Megatron-Core versions. 0.19 would insert a norm before the query
    projection if queries have no latent vector (transformer/mla_qk_norm_config.py), unlike all published models.

    Args:
        latent_norm_epsilon: of the norms of latent vectors; None: the config's `layernorm_epsilon`.
    """

    def __init__(self, config: Any, *arguments: Any, latent_norm_epsilon: float | None = None, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        if latent_norm_epsilon is None:
            return
        # Transformer Engine's layers contain the norm of their input
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            norm = getattr(self, name, None)
            if norm is not None and hasattr(norm, "eps"):
                norm.eps = latent_norm_epsilon

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Query, key and value [s, b, heads, d] also for a packed row, which Megatron-Core would make [t, heads, d]."""
        with rotary_by_position(self.rotary_pos_emb, packed_seq_params):
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, None, *arguments, **named
            )


class LocalLatentAttention(LatentAttention):
    """`LatentAttention` without Transformer Engine, with down-projections replicated over tensor-parallel ranks.

    Megatron-Core's local layers shard the down-projections, and gather the rotary part of the key with a backward that
    drops the gradients from other ranks' heads.
    """

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(config, config.q_lora_rank)
        self.linear_kv_down_proj = DownProjection(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)


class DownProjection(nn.Module):
    """A replicated linear layer without bias, which each tensor-parallel rank applies to its part of the sequence.

    Args:
        config: Megatron-Core's; reads `hidden_size`, `params_dtype` and `sequence_parallel`.
        output_size: size of the last dimension of the result.
    """

    def __init__(self, config: Any, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[s, b, hidden_size] -> [s, b, output_size], and None for the bias as in Megatron-Core's linear layers."""
        return F.linear(x, self.weight), None
