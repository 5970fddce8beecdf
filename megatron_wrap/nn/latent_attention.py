"""Multi-latent attention (DeepSeek V2, arXiv:2405.04434), corrected where Megatron-Core differs from the published
models or between its versions. Import this module only after the platform is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import CheckpointWithoutOutput, gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from megatron_wrap.nn.kernels.available import latent_rotary_kernel
from megatron_wrap.nn.packed_sequences import PackedSequences, rotary_by_position


class LatentAttention(MLASelfAttention):
    """Latent attention with the modules of the layer spec in all Megatron-Core versions. 0.19 would insert a norm
    before the query projection if queries have no latent vector (transformer/mla_qk_norm_config.py), unlike all
    published models.

    On a GPU with Triton, one kernel writes queries, keys and values, in training and in passes without a cache; else
    Megatron-Core splits, rotates and concatenates them.

    Args:
        latent_norm_epsilon: epsilon of the norms of latent vectors; None: the config's `layernorm_epsilon`.
    """

    def __init__(self, config: Any, *arguments: Any, latent_norm_epsilon: float | None = None, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        if latent_norm_epsilon is None:
            return
        # Transformer Engine's layers contain the norm of their input
        names = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
        norms = [module for name, module in self.named_children() if name in names and hasattr(module, "eps")]
        expected = 1 + (config.q_lora_rank is not None)
        assert len(norms) == expected, f"{len(norms)} norms of latent vectors have an epsilon, not {expected}"
        for norm in norms:
            norm.eps = latent_norm_epsilon  # type: ignore[assignment]

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        inference_context: Any = None,
        **named: Any,
    ) -> Any:
        """Query, key and value [s, b, heads, d], then the latent vectors. A packed row has b = 1; for it Megatron-Core
        would return [t, heads, d]."""
        with rotary_by_position(self.rotary_pos_emb, packed_seq_params):
            kernel = self._kernel(hidden_states)
            if kernel is not None and inference_context is None and not named.get("inference_params"):
                length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, self.config, None)
                embedding = self.rotary_pos_emb(length, packed_seq=False)
                angles, *factor = embedding if isinstance(embedding, tuple) else (embedding,)  # YaRN has a factor
                if angles.shape[1] == 1:  # generation gives each row of a batch its own
                    return self._fused(hidden_states, kernel, angles, *factor)
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, None, inference_context, **named
            )

    def _kernel(self, hidden_states: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
        """`kernels.attention.latent_rotary` if it computes the same as Megatron-Core, else None."""
        config = self.config
        differs = config.rotary_interleaved or config.rotary_percent != 1.0 or config.apply_rope_fusion
        return None if differs else latent_rotary_kernel(hidden_states)

    def _fused(
        self, hidden_states: Tensor, kernel: Callable[..., Any], angles: Tensor, factor: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Results of `get_query_key_value_tensors` by the kernel. The down-projections are replicated over
        tensor-parallel ranks."""
        config, heads = self.config, self.num_attention_heads_per_partition
        if config.q_lora_rank is None:
            query_latent, to_query = hidden_states, self.linear_q_proj
        else:
            query_latent, to_query = self.linear_q_down_proj(hidden_states)[0], self.linear_q_up_proj
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        latent, shared = self.linear_kv_down_proj(hidden_states)[0].split(sizes, dim=-1)
        if config.sequence_parallel and self.pg_collection.tp.size() > 1:
            shared = gather_from_sequence_parallel_region(shared, group=self.pg_collection.tp)
        if config.q_lora_rank is not None:
            query_latent = self.q_layernorm(query_latent)
        latent = self.kv_layernorm(latent)

        def project(query_latent: Tensor, latent: Tensor, shared: Tensor, angles: Tensor) -> Any:
            query = to_query(query_latent)[0].unflatten(-1, (heads, -1))
            mixed = self.linear_kv_up_proj(latent)[0].unflatten(-1, (heads, -1))
            return kernel(query, mixed, shared, angles, config.v_head_dim, factor)

        inputs = query_latent, latent, shared, angles
        if not self.recompute_up_proj:
            return *project(*inputs), query_latent, latent
        self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=config.fp8 or config.fp4)
        return *self.qkv_up_checkpoint.checkpoint(project, *inputs), query_latent, latent


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
        """Project [s, b, hidden_size] -> [s, b, output_size]; None for the bias, as in Megatron-Core's linear
        layers."""
        return F.linear(x, self.weight), None
