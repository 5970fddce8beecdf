"""Supervised fine-tuning (SFT) of a GPT model on conversations: cross-entropy of the assistant's turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.data.chat import ChatTokens, encode_sample
from megatron_wrap.flow.base import LossOutput
from megatron_wrap.flow.text import ENCODED, MegatronWrapGPTModelTextFlow
from megatron_wrap.metrics.metric import Total
from megatron_wrap.ops.log_probs import token_log_probs


class MegatronWrapGPTModelSFTFlow(MegatronWrapGPTModelTextFlow):
    """Mean cross-entropy over the tokens with `loss_mask`, weighted by their samples' `weight`.

    A sample is `{"messages": [...]}`, `{"prompt", "completion"}`, `{"text"}` or already tokenized (see
    `megatron_wrap.data.chat.encode_sample`); the metric `truncated_samples` counts truncated samples.
    """

    supports_packing = True

    def prepare_sample(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The sample with its `ChatTokens` as `encoded`."""
        tokens = self._encoded(sample)
        self.check_length(tokens)
        return {**sample, ENCODED: tokens}

    def get_sample_lengths(self, sample: Mapping[str, Any]) -> list[int]:
        """See `length_of`."""
        return [self.length_of(self._encoded(sample))]

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Collate up to B samples, prepared or not, see `collate_tokens`; `loss_mask` is multiplied by the samples'
        weights."""
        sequences = [self._encoded(sample) for sample in itertools.islice(iterator, self.micro_batch_size)]
        model_forward_inputs, loss_inputs = self.collate_tokens(sequences)
        weights = torch.tensor([tokens.weight for tokens in sequences])
        return model_forward_inputs, {**loss_inputs, "loss_mask": loss_inputs["loss_mask"] * weights[:, None]}

    def _encoded(self, sample: Mapping[str, Any]) -> ChatTokens:
        if ENCODED in sample:
            return sample[ENCODED]
        return encode_sample(self.context.tokenizer, sample, self.flow_config.loss_on)

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and the output `log_probs`."""
        return {**super().get_fields_and_seqdims(), "log_probs": 1}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the sum of cross-entropies over the tokens with `loss_mask`."""
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        loss_sum = self.token_mean(-log_probs, loss_inputs["loss_mask"])
        return LossOutput(loss_sum, {"truncated_samples": Total(self.sequence_mean(loss_inputs["truncated"]))})

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`log_probs` [B, S]: log-probability of each label; `loss_mask` [B, S] as collated, times the weights."""
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        return {"log_probs": log_probs, "loss_mask": loss_inputs["loss_mask"]}
