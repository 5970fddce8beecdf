"""Megatron-Core's GPTModel whose logits are made as [B, S, V/tp], not made as [S, B, V/tp] and copied.

GPTModel transposes and copies the logits where it is given no labels (megatron/core/models/gpt/gpt_model.py,
`_postprocess`), and their gradient again: two passes over the largest tensor of the step. Transposing the hidden states
before the output layer moves V / hidden_size times less. Imported only once the platform is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


class BatchFirstGPTModel(GPTModel):
    """A GPTModel; with labels it is Megatron-Core's own. With an inference context the logits are those of the last
    position, [B, 1, V/tp]."""

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None = None, **inputs: Any) -> Tensor:
        if inputs.get("inference_context") is not None:
            # generation looks at the last position alone. Cut here, the output layer need not know of the cache:
            # versions of Megatron-Core differ in what they then demand of it
            inputs["inference_context"] = None
            hidden_states = hidden_states[-1:] if self.post_process else hidden_states
        # sequence parallelism gathers the first dimension inside the output layer, which has to be the sequence
        if labels is not None or not self.post_process or self.output_layer.sequence_parallel:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **inputs)
        with _batch_first(self.output_layer):
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **inputs)


@contextmanager
def _batch_first(output_layer: torch.nn.Module) -> Iterator[None]:
    """The output layer computes on [B, S, H] what it is given as [S, B, H]; what it returns is a view of that."""

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
