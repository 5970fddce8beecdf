"""Supervised fine-tuning (SFT) of a GPT model on conversations: cross-entropy of the assistant's turns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.cross_entropy import CrossEntropyConfig, cross_entropy
from megatron_wrap.flow.shared.text import NextTokenFlow
from megatron_wrap.metrics.metric import Total


class MegatronWrapGPTModelSFTFlow(NextTokenFlow):
    """Mean cross-entropy over the tokens with `loss_mask`, weighted by their samples' `weight`.

    A sample is `{"messages": [...]}`, `{"prompt", "completion"}`, `{"text"}` or already tokenized (see
    `megatron_wrap.data.chat.encode.encode_sample`); the metric `truncated_samples` counts truncated samples. For
    `label_smoothing` and `z_loss_coefficient` see `shared/cross_entropy.py`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(CrossEntropyConfig, NextTokenFlow.Config):
        """Keys of `megatron_wrap.flow`."""

    supports_packing = True
    supports_multi_token_prediction = True

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the sum of cross-entropies over the tokens with `loss_mask`."""
        per_token, metrics = cross_entropy(self, loss_inputs, model_forward_output)
        metrics["truncated_samples"] = Total(self.sequence_mean(loss_inputs["truncated"]))
        return LossOutput(self.token_mean(per_token, loss_inputs["loss_mask"]), metrics)
