"""Rotary embeddings that Megatron-Core lacks. Import this module only after the platform is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor


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
