"""Megatron-Core's configuration of models without latent attention. Import it only after the platform is installed."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig


@dataclass
class DecoderConfig(TransformerConfig):
    """Configuration that also accepts features that Megatron-Core's layers lack and ours have: biases of
    tensor-parallel experts (`GroupedExperts`), and in 0.16 context parallelism of linear attention
    (`GatedDeltaNet`)."""

    def __post_init__(self) -> None:
        size: int | None = vars(self)["expert_tensor_parallel_size"]
        variant: str | None = vars(self)["experimental_attention_variant"]
        if self.num_moe_experts is not None and self.add_bias_linear:
            self.expert_tensor_parallel_size = 1
        if variant == "gated_delta_net":
            self.experimental_attention_variant = None
        super().__post_init__()
        self.experimental_attention_variant = variant
        self.expert_tensor_parallel_size = self.tensor_model_parallel_size if size is None else size


@dataclass
class YarnDecoderConfig(DecoderConfig):
    """Configuration with the values of YaRN (arXiv:2309.00071) that GPTModel and attention read by name, and that are
    no fields of Megatron-Core's class (models/gpt/gpt_model.py;
    models/common/embeddings/yarn_rotary_pos_embedding.py)."""

    yarn_rotary_scaling_factor: float = 40.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True

    def without_yarn(self) -> YarnDecoderConfig:
        """A copy for attention layers whose rotary angles are not scaled: they multiply rotated parts by 1."""
        unscaled = copy.copy(self)
        unscaled.yarn_rotary_scaling_factor = 1.0
        return unscaled
