"""Pretraining of a GPT model on windows of tokens: cross-entropy of the next token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_wrap.errors import DataError
from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.cross_entropy import CrossEntropyConfig, cross_entropy
from megatron_wrap.flow.shared.text import MegatronWrapGPTModelFlow

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class MegatronWrapGPTModelPretrainFlow(MegatronWrapGPTModelFlow):
    """Mean cross-entropy over the tokens with `loss_mask`; in a blend also that of each source, as `loss/SOURCE`. For
    `label_smoothing` and `z_loss_coefficient` see `shared/cross_entropy.py`.

    A sample is a window of the data `indexed`: `tokens`, `labels`, `loss_mask` and `position_ids`, each [S]. With
    `documents`, the tokens of each document in it, every document becomes a sequence of its own.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(CrossEntropyConfig):
        """Keys of `megatron_wrap.flow`."""

    supports_packing = True
    supports_multi_token_prediction = True
    reports_perplexity = True

    def prepare_sample(self, sample: Any) -> Any:
        """The sample. Raises DataError if it is not a window."""
        if not isinstance(sample, Mapping) or any(name not in sample for name in _FIELDS):
            raise DataError(
                f"gpt_pretrain takes windows of tokens with {', '.join(_FIELDS)}; select megatron_wrap.data indexed, "
                "or megatron_wrap.flow gpt_sft for samples with text"
            )
        return sample

    def get_sample_lengths(self, sample: Mapping[str, Any]) -> Sequence[int]:
        """Tokens of each document, or of the window."""
        return sample.get("documents") or [len(sample["tokens"])]

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Collate up to micro_batch_size windows to [B, S]; with `documents` there is a row for each of them, padded to
        the longest."""
        samples = [self.prepare_sample(sample) for sample in itertools.islice(iterator, self.micro_batch_size)]
        lengths = [self.get_sample_lengths(sample) for sample in samples]

        def rows(values: Sequence[Any]) -> Tensor:
            parts = [
                part
                for value, documents in zip(values, lengths, strict=True)
                for part in torch.as_tensor(value).split(list(documents))
            ]
            return pad_sequence(parts, batch_first=True)

        fields = {name: rows([sample[name] for sample in samples]) for name in _FIELDS}
        loss_inputs = {"labels": fields["labels"], "loss_mask": fields["loss_mask"]}
        if all("source_id" in sample for sample in samples):
            loss_inputs["source"] = rows(
                [torch.full((len(sample["tokens"]),), sample["source_id"]) for sample in samples]
            )
        model_forward_inputs = {
            "input_ids": fields["tokens"],
            "position_ids": fields["position_ids"],
            "attention_mask": rows([torch.ones(len(sample["tokens"]), dtype=torch.long) for sample in samples]),
        }
        return model_forward_inputs, loss_inputs

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and the number of each token's `source`."""
        return {**super().get_fields_and_seqdims(), "source": 1}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the sum of cross-entropies over the tokens with `loss_mask`."""
        mask = loss_inputs["loss_mask"]
        per_token, metrics = cross_entropy(self, loss_inputs, model_forward_output)
        if "source" in loss_inputs:
            for number, name in enumerate(self.context.sources):
                of_source = mask * (loss_inputs["source"] == number)
                metrics[f"loss/{name}"] = (self.token_mean(per_token.detach(), of_source), of_source.sum())
        return LossOutput(self.token_mean(per_token, mask), metrics)
