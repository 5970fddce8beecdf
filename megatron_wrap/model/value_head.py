"""Megatron-Core's GPTModel with a scalar head. Import this module only after the platform is installed."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_wrap.model.batch_first import BatchFirstGPTModel


class ValueHead(torch.nn.Module):
    """A linear layer hidden -> 1 in place of the output layer, replicated over tensor-parallel ranks.

    With sequence parallelism each rank computes the values of its part of the sequence, and the mark
    `sequence_parallel` makes Megatron-Core add up the ranks' gradients of the weight (finalize_model_grads.py,
    _allreduce_non_tensor_model_parallel_grads). Without it every rank has all hidden states and the same gradient.
    """

    def __init__(self, hidden_size: int, sequence_parallel: bool, like: Tensor) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, hidden_size, dtype=like.dtype, device=like.device))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[S/tp, B, H] with sequence parallelism, else any [.., .., H], to the values of the whole sequence; and no
        bias, as Megatron-Core's output layer returns them."""
        values = torch.nn.functional.linear(hidden_states, self.weight)
        if self.sequence_parallel:
            # the loss is computed on every rank alike, so the gradient of the own part is complete: no reduction
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class GPTValueModel(BatchFirstGPTModel):
    """Returns values [B, S/cp, 1] instead of logits; takes the arguments of GPTModel."""

    output_layer: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, share_embeddings_and_output_weights=False)
        if self.post_process:
            replaced = self.output_layer.weight
            self.output_layer = ValueHead(self.config.hidden_size, self.config.sequence_parallel, replaced)
