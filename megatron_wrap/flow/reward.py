"""Reward model of preference pairs (Bradley-Terry): a score for each sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_wrap.config.schema.keys import key
from megatron_wrap.data.chat.encode import ChatTokens, encode_sample, truncate
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.pairs import PairFlow, weighted
from megatron_wrap.metrics.metric import Maximum, Minimum


class MegatronWrapGPTModelRewardFlow(PairFlow):
    """Mean over pairs of -log sigmoid(score of the chosen sequence - score of the rejected one - margin), plus
    `center_rewards_coefficient` times the mean of (sum of the two scores)^2, as in trl's RewardTrainer (Bradley-Terry;
    margin: Touvron et al., 2023, arXiv:2307.09288, equation 2; centering: Eisenstein et al., 2023, arXiv:2312.09244).
    The score of a sequence is the value of `megatron_wrap.model_provider.provider_key: gpt_value_model` at its last
    token.

    A pair may contain a number `margin`, 0 by default. For `wrap.forward` samples may also be single sequences, in the
    formats of gpt_sft, or `input_ids` alone.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(PairFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        center_rewards_coefficient: float = key(0.0, at_least=0)
        """Coefficient of the mean squared sum of a pair's scores, which keeps scores around 0. 0.01 is usual."""

    supports_packing = True
    console_metrics = ("accuracy", "margin", "truncated_samples")

    def _encode(self, sample: Mapping[str, Any]) -> tuple[ChatTokens, ...]:
        """`ChatTokens` of the chosen and of the rejected sequence, or of the only one.

        Raises:
            DataError: a sequence has no tokens, or the margin of a pair is not a finite number.
        """
        if is_pair(sample):
            sequences = super()._encode({key: value for key, value in sample.items() if key != "margin"})
            _margin(sample)
        else:
            without_loss = {"labels": sample["input_ids"]} if "input_ids" in sample else {}
            sequences = (encode_sample(self.context.tokenizer, {**without_loss, **sample}, "all"),)
        if not all(len(tokens) for tokens in sequences):
            raise DataError("a sequence of the sample has no tokens; remove the sample")
        return sequences

    def check_length(self, tokens: ChatTokens) -> None:
        """See the base class; here the last token is an input as well."""
        if self.flow_config.truncation == "refuse":
            truncate(tokens, self.seq_length, "refuse")

    def length_of(self, tokens: ChatTokens) -> int:
        """Number of the sequence's tokens, after truncation; at least 1."""
        return min(max(1, len(tokens)), self.seq_length)

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Up to B pairs, prepared or not, as 2B sequences [2B, S], the chosen ones first; or up to B single sequences
        [B, S]. All tokens are inputs; `last_token` [., S] is 1 at the last token of each sequence. `truncated` is [B];
        pairs also have `pair_weights` and `margin` [B].

        Raises:
            DataError: a micro-batch contains pairs and single sequences, or a margin is not a finite number.
        """
        samples = list(islice(iterator, self.micro_batch_size))
        if len({is_pair(sample) for sample in samples}) > 1:
            raise DataError("some samples are pairs (chosen and rejected) and others single sequences; do not mix them")
        by_sample = [self._encoded(sample) for sample in samples]
        sequences = [tokens for of_kind in zip(*by_sample, strict=True) for tokens in of_kind]
        model_forward_inputs, collated = self.collate_tokens([_with_a_label(tokens) for tokens in sequences])
        lengths = model_forward_inputs["attention_mask"].sum(dim=1, keepdim=True)
        positions = torch.arange(model_forward_inputs["input_ids"].shape[1])
        loss_inputs = {
            "last_token": (positions == lengths - 1).float(),
            "truncated": collated["truncated"].view(-1, len(samples)).amax(dim=0),
        }
        if is_pair(samples[0]):
            loss_inputs["pair_weights"] = torch.tensor([tokens.weight for tokens, _ in by_sample])
            loss_inputs["margin"] = torch.tensor([_margin(sample) for sample in samples])
        return model_forward_inputs, loss_inputs

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The model's inputs and `last_token`."""
        return {"input_ids": 1, "position_ids": 1, "attention_mask": 1, "last_token": 1}

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float:
        """Sum of the weights of the micro-batch's pairs, each 1 by default; the number of single sequences."""
        weights = loss_inputs.get("pair_weights", torch.ones_like(loss_inputs["truncated"]))
        return float(weights.sum())

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the weighted sum over pairs. Metrics: `accuracy` (chosen above rejected) and `margin`
        (their difference), weighted means over pairs; `min_reward`, `mean_reward` and `max_reward` over all scores of
        pairs with a weight.

        Raises:
            DataError: the samples are single sequences.
        """
        if "pair_weights" not in loss_inputs:
            raise DataError(
                "gpt_reward trains on pairs, but the samples have no chosen and rejected answer; add both to each"
            )
        chosen, rejected = self._scores(loss_inputs, model_forward_output).chunk(2)
        weights, difference = loss_inputs["pair_weights"], chosen - rejected
        losses = -logsigmoid(difference - loss_inputs["margin"])
        losses = losses + self.flow_config.center_rewards_coefficient * (chosen + rejected) ** 2
        reported = {
            "accuracy": (difference > 0).float(),
            "margin": difference,
            "mean_reward": (chosen + rejected) / 2,
        }
        counted, scores = weights != 0, torch.stack([chosen, rejected])
        metrics = {
            **self.pair_metrics(reported, loss_inputs, weights),
            "min_reward": Minimum(torch.where(counted, scores, torch.inf).amin()),
            "max_reward": Maximum(torch.where(counted, scores, -torch.inf).amax()),
        }
        return LossOutput(self.sequence_mean(weighted(losses, weights)), metrics)

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`chosen_score` and `rejected_score` of pairs, `score` of single sequences, [B] each."""
        scores = self._scores(loss_inputs, model_forward_output)
        if "pair_weights" not in loss_inputs:
            return {"score": scores}
        chosen, rejected = scores.chunk(2)
        return {"chosen_score": chosen, "rejected_score": rejected}

    def _scores(self, loss_inputs: Mapping[str, Tensor], values: Tensor) -> Tensor:
        """The value at the last token of each sequence, equal on every context-parallel rank."""
        if values.shape[-1] != 1:
            raise ConfigError(
                f"gpt_reward needs one value for each token, but the model returns {values.shape[-1]}; set "
                "megatron_wrap.model_provider.provider_key: gpt_value_model"
            )
        last = loss_inputs["last_token"]
        at_last = torch.where(last != 0, values.squeeze(-1).float(), 0.0)
        return self.sum_per_sequence(at_last, loss_inputs)


def _with_a_label(tokens: ChatTokens) -> ChatTokens:
    """The sequence with one more token: `collate_tokens` takes the last one as a label only."""
    return replace(tokens, input_ids=[*tokens.input_ids, 0], loss_mask=[*tokens.loss_mask, 0])


def is_pair(sample: Mapping[str, Any]) -> bool:
    """Whether a sample, prepared or not, has an answer of a pair; else it is a single sequence."""
    return any(key in sample for key in ("chosen", "rejected", "chosen_ids", "rejected_ids"))


def _margin(sample: Mapping[str, Any]) -> float:
    margin = sample.get("margin", 0.0)
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < float("inf"):
        raise DataError(f'"margin" is {margin!r}; it must be a finite number')
    return float(margin)
