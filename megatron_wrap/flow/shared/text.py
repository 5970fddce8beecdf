"""Bases of flows for a GPT model: its forward inputs; samples encoded and collated into a padded micro-batch for
next-token prediction; one sequence per sample, for supervised fine-tuning and distillation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_wrap.config.checks.vocabulary import check_token_ids
from megatron_wrap.data.chat.encode import ChatTokens, LossOn, encode_sample, truncate
from megatron_wrap.data.chat.tokenizer import pad_token_id
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow.contract.base import FlowContext, MegatronWrapFlowConfig, MegatronWrapTrainingFlowBase
from megatron_wrap.ops.log_probs import token_log_probs


class MegatronWrapGPTModelFlow(MegatronWrapTrainingFlowBase):
    """Model inputs are `input_ids`, `position_ids` and `attention_mask`, each [B, S]; attention is causal and
    attention_mask is 1 on tokens, 0 on padding to their right."""

    REQUIRED = ("input_ids", "position_ids", "attention_mask")

    def validate_model_forward_inputs(self, model_forward_inputs: Mapping[str, Tensor]) -> None:
        """Check the names of the model inputs.

        Raises:
            FlowError: one of `REQUIRED` is missing.
        """
        missing = [name for name in self.REQUIRED if name not in model_forward_inputs]
        if missing:
            raise FlowError(
                f"{type(self).__name__}.collate_data_micro_batch: model_forward_inputs lack {', '.join(missing)}; "
                f"a GPT model takes {', '.join(self.REQUIRED)}, each [B, S]"
            )


ENCODED = "encoded"
"""Key of a prepared sample's tokens."""


class TextFlow(MegatronWrapGPTModelFlow):
    """Base of flows on tokenized text, with keys for padding and truncation."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapFlowConfig):
        """Keys of `megatron_wrap.flow`."""

        collate_type: Literal["variable_length", "fixed_length"] = "variable_length"
        """variable_length: pad to the longest sequence of the micro-batch; fixed_length: pad to seq_length."""
        truncation: Literal["right", "left", "refuse"] = "right"
        """A sequence longer than seq_length: right (drop its end), left (drop its start) or refuse. To leave long
        samples out: refuse with data.on_bad_sample: skip, or max_length of a source."""
        loss_on: LossOn = "assistant"
        """Tokens of a conversation (messages) with a loss: every turn of the assistant, its last one, or all tokens. In
        other samples these are the completion, the whole text, or those of loss_mask, whatever is set here."""

    def __init__(self, flow_config: Any, context: FlowContext) -> None:
        super().__init__(flow_config, context)
        self.pad_id = 0 if context.tokenizer is None else pad_token_id(context.tokenizer)

    def _encode(self, sample: Mapping[str, Any]) -> Any:
        """`ChatTokens` of a sample that is not prepared, or a tuple of them if it has several sequences. Default:
        `encode_sample`."""
        return encode_sample(self.context.tokenizer, sample, self.flow_config.loss_on)

    def _encoded(self, sample: Mapping[str, Any]) -> Any:
        """The result of `_encode` for a sample, prepared or not."""
        return sample[ENCODED] if ENCODED in sample else self._encode(sample)

    def prepare_sample(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The sample with its tokens as `encoded`, see `_encode`.

        Raises:
            DataError: the sample is wrong, has a token id outside the vocabulary, or is longer than `truncation:
                refuse` allows.
        """
        encoded = self._encoded(sample)
        for tokens in _sequences(encoded):
            check_token_ids("the sample", tokens.input_ids, self.context.num_token_ids)
            self.check_length(tokens)
        return {**sample, ENCODED: encoded}

    def get_sample_lengths(self, sample: Mapping[str, Any]) -> list[int]:
        """Length of each sequence, see `length_of`."""
        return [self.length_of(tokens) for tokens in _sequences(self._encoded(sample))]

    def check_length(self, tokens: ChatTokens) -> None:
        """Raise `DataError` if the sequence is longer than seq_length and `truncation` is refuse."""
        if self.flow_config.truncation == "refuse":
            truncate(tokens, self.seq_length + 1, "refuse")

    def length_of(self, tokens: ChatTokens) -> int:
        """Number of the model's input tokens for a sequence: without its last one, after truncation; at least 1."""
        return min(max(1, len(tokens) - 1), self.seq_length)

    def collate_tokens(self, sequences: Sequence[ChatTokens]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs are all tokens but the last, labels all but the first; a sequence of more than seq_length + 1 tokens
        is truncated.

        Returns:
            Model inputs; and `labels`, `loss_mask` ([B, S] each) and `truncated` ([B], 1 for a truncated sequence).
        """
        cut = [truncate(tokens, self.seq_length + 1, self.flow_config.truncation) for tokens in sequences]
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
        """`input_ids` are padded with the tokenizer's padding token, or 0 without a tokenizer."""
        return {"input_ids": self.pad_id}


def contain_keys(samples: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    """Whether the samples of a micro-batch contain the optional keys `names`; null is no value.

    Raises:
        DataError: only some samples contain them, or only some of the keys.
    """
    present = [sample.get(name) is not None for sample in samples for name in names]
    if any(present) and not all(present):
        raise DataError(f"only some samples contain {' and '.join(names)}; every sample must contain them, or none")
    return any(present)


def number_columns(samples: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Tensor]:
    """Name -> [B] fp32, the numbers of the optional keys `names`; empty if no sample contains them.

    Raises:
        DataError: only some samples contain them, or only some of the keys.
    """
    if not contain_keys(samples, names):
        return {}
    return {name: torch.tensor([sample[name] for sample in samples], dtype=torch.float32) for name in names}


def _sequences(encoded: Any) -> Sequence[ChatTokens]:
    return (encoded,) if isinstance(encoded, ChatTokens) else encoded


class NextTokenFlow(TextFlow):
    """A sample is `{"messages": [...]}`, `{"prompt", "completion"}`, `{"text"}` or already tokenized (see
    `megatron_wrap.data.chat.encode.encode_sample`). Means are over the tokens with `loss_mask`, weighted by their
    samples' `weight`."""

    supports_packing = True

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Up to B samples, prepared or not, see `collate_tokens`; `loss_mask` is multiplied by the samples' weights."""
        sequences = [self._encoded(sample) for sample in itertools.islice(iterator, self.micro_batch_size)]
        model_forward_inputs, loss_inputs = self.collate_tokens(sequences)
        weights = torch.tensor([tokens.weight for tokens in sequences])
        return model_forward_inputs, {**loss_inputs, "loss_mask": loss_inputs["loss_mask"] * weights[:, None]}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and the output `log_probs`."""
        return {**super().get_fields_and_seqdims(), "log_probs": 1}

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`log_probs` [B, S]: log-probability of each label; `loss_mask` [B, S] as collated, times the weights."""
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        return {"log_probs": log_probs, "loss_mask": loss_inputs["loss_mask"]}
