"""Megatron-Core's configuration of a model with YaRN (arXiv:2309.00071) outside of latent attention. Import it only
after the platform is installed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig


@dataclass
class YarnTransformerConfig(TransformerConfig):
    """With the values that GPTModel and attention read by name, but that are no fields of Megatron-Core's class
    (models/gpt/gpt_model.py; models/common/embeddings/yarn_rotary_pos_embedding.py)."""

    yarn_rotary_scaling_factor: float = 40.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True
