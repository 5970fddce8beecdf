"""Multi-latent attention (DeepSeek V2, arXiv:2405.04434) where Megatron-Core's own differs from the published models or
between its versions. Imported only once the platform is installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn


class LatentAttention(MLASelfAttention):
    """Megatron-Core's, with the modules of the layer spec in both versions: 0.19 would put a norm before the queries'
    projection where they have no latent vector (transformer/mla_qk_norm_config.py), which no published model has."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class LocalLatentAttention(LatentAttention):
    """The same without Transformer Engine, whose down-projections are whole on each tensor-parallel process.

    Megatron-Core's local layers cut them, and gather the rotated part of the key so that each process keeps only the
    gradient of its own heads.
    """

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(config, config.q_lora_rank)
        self.linear_kv_down_proj = DownProjection(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)


class DownProjection(nn.Module):
    """A product without bias that every tensor-parallel process does whole for its part of the sequence.

    Args:
        config: Megatron-Core's; `hidden_size`, `params_dtype` and `sequence_parallel` are read.
        output_size: columns of the result.
    """

    def __init__(self, config: Any, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[s, b, hidden_size] to [s, b, output_size] and, as Megatron-Core's linear layers have it, no bias."""
        return F.linear(x, self.weight), None
