"""Megatron-Core's GPTModel with logits computed as [B, S, V/tp], instead of computed as [S, B, V/tp] and transposed.

Without labels, GPTModel transposes and copies the logits (megatron/core/models/gpt/gpt_model.py, `_postprocess`) and in
the backward their gradient, the largest tensors of the step. Transposing the hidden states before the output layer
moves V / hidden_size times less memory. Import this module only after the platform is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_wrap.ops.packed import PackedSequences, rotary_by_position


class BatchFirstGPTModel(GPTModel):
    """A GPTModel, unchanged with labels. Rotary embeddings restart with each sequence of a packed row. With an
    inference context it returns the logits of the last position only, [B, 1, V/tp]."""

    def _preprocess(self, *arguments: Any, packed_seq_params: PackedSequences | None = None, **named: Any) -> Any:
        rotary = getattr(self, "rotary_pos_emb", None)
        with rotary_by_position(rotary, packed_seq_params):
            return super()._preprocess(*arguments, packed_seq_params=packed_seq_params, **named)

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None = None, **inputs: Any) -> Tensor:
        if inputs.get("inference_context") is not None:
            # Generation needs only the last position. Select it here and hide the inference context from
            # `_postprocess`, whose requirements for it differ between Megatron-Core versions.
            inputs["inference_context"] = None
            hidden_states = hidden_states[-1:] if self.post_process else hidden_states
        # with sequence parallelism, the output layer gathers the first dimension, which must be the sequence
        if labels is not None or not self.post_process or self.output_layer.sequence_parallel:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **inputs)
        with _batch_first(self.output_layer):
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **inputs)


@contextmanager
def _batch_first(output_layer: torch.nn.Module) -> Iterator[None]:
    """Make the output layer transpose its input [S, B, H] to [B, S, H], and return a transposed view of its output."""

    def batch_first(_layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return inputs[0].transpose(0, 1).contiguous(), *inputs[1:]

    def sequence_first(_layer: Any, _inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = outputs
        return logits.transpose(0, 1), bias

    hooks = (output_layer.register_forward_pre_hook(batch_first), output_layer.register_forward_hook(sequence_first))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
