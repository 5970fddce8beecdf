"""The padding of the vocabulary to a size that tensor-parallel ranks can share: the size, and the mask of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_wrap.model.request import ModelRequest
from megatron_wrap.ops.deferred_logits import is_deferred

if TYPE_CHECKING:
    from megatron_wrap.model.gpt_model import BatchFirstGPTModel


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """The vocabulary size rounded up to a multiple of divisible_by * tensor_parallel_size, as in Megatron-LM
    (megatron/training/tokenizer)."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def mask_padded_vocabulary(model: BatchFirstGPTModel, request: ModelRequest) -> None:
    """Mask the padding columns of the vocabulary, so that the loss does not depend on the amount of padding, which
    grows with the tensor-parallel size."""
    tp = request.state.tp
    columns = request.padded_vocab_size // tp.size
    first_padded = max(0, request.vocab_size - tp.rank * columns)
    if first_padded >= columns:
        return
    if model.defers_logits:
        model.output_layer.unpadded = first_padded

    def mask(_module: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = outputs
        if is_deferred(logits):
            return outputs
        logits[..., first_padded:] = torch.finfo(logits.dtype).min / 2
        return logits, bias

    model.output_layer.register_forward_hook(mask)
