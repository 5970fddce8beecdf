"""Supervised fine-tuning of a GPT model on conversations: cross-entropy of the assistant's turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_wrap.core.flow.base import FlowContext, LossOutput, MegatronWrapFlowConfig
from megatron_wrap.core.flow.gpt import MegatronWrapGPTModelFlow
from megatron_wrap.data.chat import encode_sample, truncate
from megatron_wrap.data.tokenizer import pad_token_id
from megatron_wrap.metrics.metric import Total
from megatron_wrap.ops.log_probs import token_log_probs


class MegatronWrapGPTModelSFTFlow(MegatronWrapGPTModelFlow):
    """Mean cross-entropy over the tokens with `loss_mask`.

    A sample is `{"messages": [...]}`, `{"prompt", "completion"}`, `{"text"}` or already tokenized (see
    `megatron_wrap.data.chat.encode_sample`). Inputs are all tokens but the last, labels all but the first. A sample of
    more than seq_length + 1 tokens is cut by the rule `truncation`, and counted in the metric `truncated_samples`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapFlowConfig):
        """Keys of `megatron_wrap.flow`."""

        collate_type: Literal["variable_length", "fixed_length"] = "variable_length"
        """variable_length: pad to the longest sample of the micro-batch; fixed_length: pad to seq_length."""
        truncation: Literal["right", "left", "refuse"] = "right"
        """A sample longer than seq_length: drop its end, drop its start, or refuse it."""

    def __init__(self, flow_config: Any, context: FlowContext) -> None:
        super().__init__(flow_config, context)
        self.pad_id = 0 if context.tokenizer is None else pad_token_id(context.tokenizer)

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        samples = itertools.islice(iterator, self.micro_batch_size)
        encoded = [encode_sample(self.context.tokenizer, sample) for sample in samples]
        cut = [truncate(tokens, self.seq_length + 1, self.flow_config.truncation) for tokens in encoded]
        longest = max(len(tokens.input_ids) for tokens, _ in cut) - 1
        width = self.seq_length if self.flow_config.collate_type == "fixed_length" else max(1, longest)

        input_ids = torch.full((len(cut), width), self.pad_id)
        labels = torch.zeros(len(cut), width, dtype=torch.long)
        loss_mask = torch.zeros(len(cut), width)
        attention_mask = torch.zeros(len(cut), width, dtype=torch.long)
        for row, (tokens, _) in enumerate(cut):
            ids, length = torch.tensor(tokens.input_ids, dtype=torch.long), max(0, len(tokens.input_ids) - 1)
            input_ids[row, :length] = ids[:-1]
            labels[row, :length] = ids[1:]
            loss_mask[row, :length] = torch.tensor(tokens.loss_mask)[1:]
            attention_mask[row, :length] = 1

        model_forward_inputs = {
            "input_ids": input_ids,
            "position_ids": torch.arange(width).expand(len(cut), -1),
            "attention_mask": attention_mask,
        }
        truncated = torch.tensor([float(was_cut) for _, was_cut in cut])
        return model_forward_inputs, {"labels": labels, "loss_mask": loss_mask, "truncated": truncated}

    def get_pad_values(self) -> dict[str, float]:
        return {"input_ids": self.pad_id}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        return {**super().get_fields_and_seqdims(), "log_probs": 1}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        loss_sum = self.token_mean(-log_probs, loss_inputs["loss_mask"])
        return LossOutput(loss_sum, {"truncated_samples": Total(self.sequence_mean(loss_inputs["truncated"]))})

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`log_probs` [B, S]: log-probability of each label; `loss_mask` [B, S] as collated."""
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        return {"log_probs": log_probs, "loss_mask": loss_inputs["loss_mask"]}
