"""Self-attention that differs from Megatron-Core's: queries, keys and values from one kernel, norms over all heads,
rotary angles by the kind of a layer; and multi-latent attention (DeepSeek V2, arXiv:2405.04434), corrected where
Megatron-Core differs from the published models or between its versions. Import this module only after the platform is
installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_wrap.nn.attention.packed_sequences import PackedSequences, rotary_by_position
from megatron_wrap.nn.kernels.available import latent_rotary_kernel
from megatron_wrap.nn.layers.norm import RMSNorm
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
        from megatron_wrap.nn.kernels.rotary_projections import HeadNorms, split_normalized_rotary

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
        packed = packed_seq_params
        with nullcontext() if packed is None else rotary_by_position(self.rotary_pos_emb, packed):
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
        """`kernels.rotary_projections.latent_rotary` if it computes the same as Megatron-Core, else None."""
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


class LongRotaryEmbedding(RotaryEmbedding):
    """LongRoPE (arXiv:2402.13753): the frequency of each rotated pair divided by its factor. Attention multiplies the
    rotated parts by the attention factor.

    Args:
        factors: one for each rotated pair of a head.
        arguments, named: those of Megatron-Core's class.
    """

    inv_freq: Tensor

    def __init__(self, *arguments: Any, factors: Sequence[float], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.inv_freq = self.inv_freq / self.inv_freq.new_tensor(factors)


class RotaryByWindow(nn.Module):
    """Rotary angles of layers without and with a window, [s, 1, 1, 2 d]: two halves, of which each layer takes one
    (`DecoderSelfAttention`). They are one tensor, so that Megatron-Core passes it through pipelines and recomputation
    as the angles of a model with one rotary embedding.

    Args:
        whole, window: Megatron-Core's rotary embedding of layers without and with a window.
    """

    def __init__(self, whole: nn.Module, window: nn.Module) -> None:
        super().__init__()
        self.whole, self.window = whole, window

    def get_rotary_seq_len(self, *arguments: Any, **named: Any) -> int:
        """See Megatron-Core's class."""
        whole: Any = self.whole
        length: int = whole.get_rotary_seq_len(*arguments, **named)
        return length

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Both embeddings' angles, concatenated; YaRN also returns its attention factor."""
        window = self.window(*arguments, **named)
        whole = self.whole(*arguments, **named)
        if isinstance(whole, tuple):
            return torch.cat((whole[0], window), dim=-1), *whole[1:]
        return torch.cat((whole, window), dim=-1)
