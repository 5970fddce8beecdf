"""The provider `gpt_value_model`: the GPT of `gpt_model` with one number for each token instead of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_wrap.model.gpt import gpt_arguments
from megatron_wrap.model.request import ModelRequest

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def gpt_value_model_provider(request: ModelRequest) -> GPTModel:
    """One chunk of a value model on this process's device, with uninitialized weights.

    The output is [B, S/cp, 1], equal on all tensor-parallel ranks: a linear function without bias of the last hidden
    state, as in transformers' models for sequence classification. It is not tied to the embedding.
    """
    from megatron_wrap.model.value_head import GPTValueModel

    return GPTValueModel(**gpt_arguments(request))
