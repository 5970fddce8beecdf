"""Rotary embeddings that Megatron-Core lacks. Import this module only after the platform is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn


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
