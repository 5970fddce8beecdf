"""Transformer Engine's attention on packed rows. Import this module only after the platform is installed, and only
where Transformer Engine is available."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

from megatron_wrap.nn.attention.packed_sequences import PackedSequences


class PackedDotProductAttention(TEDotProductAttention):
    """Megatron-Core's wrapper of Transformer Engine's attention, which also takes a `PackedSequences`, and whose sinks
    are marked as sharded over tensor-parallel ranks, for initial weights and the gradient norm."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.config.softmax_type == "learnable":
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *arguments: Any,
        packed_seq_params: PackedSequences | None = None,
        **named: Any,
    ) -> Tensor:
        """See `TorchCoreAttention.forward`: [s, b, heads, d] with b = 1 for a packed row -> [s, b, heads * d_v]."""
        if packed_seq_params is None:
            return super().forward(query, key, value, *arguments, **named)
        width = value.shape[-1]
        value = F.pad(value, (0, query.shape[-1] - width))  # its kernels for thd need heads of one size
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        output = super().forward(query, key, value, *arguments, packed_seq_params=packed_seq_params.thd(), **named)
        heads = output.reshape(output.shape[0], 1, query.shape[1], -1)
        return heads[..., :width].reshape(output.shape[0], 1, -1)
