"""A custom flow: supervised fine-tuning with a second named term that keeps the largest logits small.

The term is the max-z loss of Baichuan 2 (https://arxiv.org/abs/2309.10305, section 2.6): coefficient * z^2, where z is
the largest logit of a token. The cross-entropy is a mean over the assistant's tokens, the max-z loss over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.sft import MegatronWrapGPTModelSFTFlow
from megatron_wrap.ops.log_probs import token_log_probs, vocabulary_max


class MaxZFlow(MegatronWrapGPTModelSFTFlow):
    """objective = mean cross-entropy + max_z_coefficient * mean of (largest logit)^2."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapGPTModelSFTFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        max_z_coefficient: float = 2.0e-4
        """Of the mean squared largest logit."""

    supports_packing = True  # both terms are means over tokens

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors of `gpt_sft`, and `token_mask` [B, S]: 1 on every token, 0 on padding."""
        model_forward_inputs, loss_inputs = super().collate_data_micro_batch(iterator)
        return model_forward_inputs, {**loss_inputs, "token_mask": model_forward_inputs["attention_mask"]}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """`token_mask` in addition to the fields of `gpt_sft`."""
        return {**super().get_fields_and_seqdims(), "token_mask": 1}

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> dict[str, float]:
        """The assistant's tokens for the cross-entropy, all tokens for the max-z loss."""
        return {
            "cross_entropy": float(loss_inputs["loss_mask"].sum()),
            "max_z": float(loss_inputs["token_mask"].sum()),
        }

    def get_loss_coefficients(self) -> dict[str, float]:
        """1 for the cross-entropy, the option for the max-z loss."""
        return {"max_z": self.flow_config.max_z_coefficient}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the two sums, which are also the metrics."""
        loss_mask, token_mask = loss_inputs["loss_mask"], loss_inputs["token_mask"]
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        cross_entropy = self.token_mean(-log_probs, loss_mask)
        max_z = self.token_mean(vocabulary_max(model_forward_output) ** 2, token_mask)
        return LossOutput(
            {"cross_entropy": cross_entropy, "max_z": max_z},
            metrics={"cross_entropy": (cross_entropy, loss_mask.sum()), "max_z": (max_z, token_mask.sum())},
        )
