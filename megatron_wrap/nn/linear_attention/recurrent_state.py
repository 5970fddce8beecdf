"""State that a layer of linear attention keeps of the tokens processed in generation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RecurrentState:
    """State of one layer: the last inputs of the convolution, and the state of each head.

    Args:
        padding: [prompts], number of padding positions on the left of each prompt in the first pass.
        sources: [batch size], for each sequence the index of its prompt in the first pass.
    """

    def __init__(self, padding: Tensor, sources: Tensor) -> None:
        self._padding, self._sources = padding, sources
        self.inputs: Tensor | None = None
        """Last inputs of the convolution, [b, K - 1, channels]; None before the first pass."""
        self.heads: Tensor | None = None
        """State of each head, fp32 [b, heads, d_k, d_v]; None before the first pass."""

    def without_padding(self, inputs: Tensor) -> Tensor:
        """The inputs [b, s, channels] of a pass, 0 in the padding, where keys and values are then 0 as well."""
        if self.inputs is not None:
            return inputs
        is_padding = torch.arange(inputs.shape[1], device=inputs.device) < self._padding[:, None]
        return inputs.masked_fill(is_padding[..., None], 0.0)

    def keep(self, inputs: Tensor, earlier: int, heads: Tensor) -> None:
        """Keep the last `earlier` inputs [b, s, channels], and the state of the heads after a pass."""
        if self.inputs is None:
            last = F.pad(inputs, (0, 0, earlier, 0))[:, inputs.shape[1] :]
            self.inputs, self.heads = last[self._sources], heads[self._sources]
            return
        self.inputs = torch.cat((self.inputs, inputs), dim=1)[:, -earlier:] if earlier else self.inputs
        self.heads = heads
