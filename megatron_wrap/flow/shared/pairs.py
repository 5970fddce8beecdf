"""Base of flows on preference pairs: a prompt with a chosen and a rejected answer, collated as
two sequences; without a reference model, a preference term and a likelihood term."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_wrap.data.chat.encode import ChatTokens, encode_pair
from megatron_wrap.errors import DataError
from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.text import TextFlow
from megatron_wrap.metrics.metric import Metric, Total
from megatron_wrap.ops.log_probs import log_probs_and_entropy, token_log_probs


class PairFlow(TextFlow):
    """A sample is a pair (see `megatron_wrap.data.chat.encode.encode_pair`). A micro-batch of B pairs has 2B sequences,
    the chosen ones first. A pair's `weight`, 1 by default, is its weight in means over pairs."""

    console_metrics: ClassVar[Sequence[str]] = (
        "rewards/accuracies",
        "rewards/margins",
        "nll_loss",
        "truncated_samples",
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(TextFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        def __post_init__(self) -> None:
            if self.loss_on != "assistant":
                raise ValueError(f"loss_on is {self.loss_on}; a preference pair has its loss on the answers, assistant")

    def _encode(self, sample: Mapping[str, Any]) -> tuple[ChatTokens, ...]:
        """`ChatTokens` of the chosen and of the rejected sequence.

        Raises:
            DataError: not a pair, or an answer has no tokens.
        """
        pair = encode_pair(self.context.tokenizer, sample)
        for name, tokens in zip(("chosen", "rejected"), pair, strict=True):
            if not any(tokens.loss_mask):
                raise DataError(f'the answer "{name}" of a pair has no tokens; complete or remove the pair')
        return pair

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Up to B pairs, prepared or not, as 2B sequences [2B, S], the chosen ones first; `token_weights` [2B, S] is
        `loss_mask` times the pair's weight, `truncated` and `pair_weights` are [B]; `collate_pairs` adds others."""
        samples = list(itertools.islice(iterator, self.micro_batch_size))
        pairs = [self._encoded(sample) for sample in samples]
        sequences = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        model_forward_inputs, loss_inputs = self.collate_tokens(sequences)
        loss_inputs["truncated"] = loss_inputs["truncated"].view(2, len(pairs)).amax(dim=0)
        weights = torch.tensor([chosen.weight for chosen, _ in pairs])
        loss_inputs["pair_weights"] = weights
        loss_inputs["token_weights"] = loss_inputs["loss_mask"] * weights.repeat(2)[:, None]
        return model_forward_inputs, {**loss_inputs, **self.collate_pairs(samples, model_forward_inputs, loss_inputs)}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and `token_weights`."""
        return {**super().get_fields_and_seqdims(), "token_weights": 1}

    def collate_pairs(
        self, samples: list[Mapping[str, Any]], model_forward_inputs: dict[str, Tensor], loss_inputs: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Further loss inputs of a micro-batch of B samples; they replace those of the same name. The default: none."""
        return {}

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float | dict[str, float] | None:
        """Sum of the weights of the micro-batch's pairs, each 1 by default."""
        return float(loss_inputs["pair_weights"].sum())

    def answer_log_probs(self, loss_inputs: Mapping[str, Tensor], log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the chosen and the rejected answers given their prompts, [B] each, equal on every
        context-parallel rank.

        Args:
            log_probs: result of `label_log_probs`.
        """
        chosen, rejected = self.sum_per_sequence(log_probs * loss_inputs["loss_mask"], loss_inputs).chunk(2)
        return chosen, rejected

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`chosen_log_probs` and `rejected_log_probs`, [B]: log-probability of each answer given its prompt."""
        log_probs = label_log_probs(model_forward_output, loss_inputs["labels"], loss_inputs["loss_mask"])
        chosen, rejected = self.answer_log_probs(loss_inputs, log_probs)
        return {"chosen_log_probs": chosen, "rejected_log_probs": rejected}

    def pair_metrics(
        self, values: Mapping[str, Tensor], loss_inputs: Mapping[str, Tensor], weights: Tensor
    ) -> dict[str, Metric]:
        """Means of values [B] over pairs, weighted by `weights` [B], by name; and the number of truncated pairs."""
        metrics: dict[str, Metric] = {
            name: (weighted(value.detach(), weights).sum(), weights.sum()) for name, value in values.items()
        }
        return {**metrics, "truncated_samples": Total(self.sequence_mean(loss_inputs["truncated"]))}


def rewards_and_log_probs(
    chosen_rewards: Tensor, rejected_rewards: Tensor, chosen: Tensor, rejected: Tensor
) -> dict[str, Tensor]:
    """Values [B] of the metrics on rewards and log-probabilities of the answers, with trl's names."""
    margins = chosen_rewards - rejected_rewards
    return {
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/margins": margins,
        "rewards/accuracies": (margins > 0).float(),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }


def label_log_probs(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Log-probabilities of the labels, [B, S/cp]; 0 where `counted` is 0, so that inf there has no effect."""
    return torch.where(counted != 0, token_log_probs(logits, labels), 0.0)


def label_log_probs_and_entropy(
    logits: Tensor, labels: Tensor, counted: Tensor, token_weights: Tensor
) -> tuple[Tensor, Metric]:
    """`label_log_probs`, and the metric `entropy`: the mean entropy in nats of the policy's distribution over the
    tokens of `token_weights` [B, S/cp], as in trl."""
    log_probs, entropies = log_probs_and_entropy(logits, labels)
    entropy_sum = torch.where(token_weights != 0, entropies * token_weights, 0.0).sum()
    return torch.where(counted != 0, log_probs, 0.0), (entropy_sum, token_weights.sum())


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Values [B] times their weights; 0 where the weight is 0, also for inf and nan."""
    return torch.where(weights != 0, values * weights, torch.zeros_like(values))


PREFERENCE, NLL = "preference", "nll"
"""The terms of the loss."""


class ReferenceFreeFlow(PairFlow):
    """A mean over pairs plus the negative log-likelihood of the chosen sequences, a mean over the tokens of `nll_mask`.

    Both are means over the whole step, whereas trl averages over each micro-batch and then over micro-batches: the two
    are equal with one micro-batch per step. If truncation removes all tokens of an answer, the answer has no mean
    log-probability: the weight of its pair is 0 in the mean over pairs, and the chosen sequence keeps its likelihood
    term.
    """

    def collate_pairs(
        self, samples: list[Mapping[str, Any]], model_forward_inputs: dict[str, Tensor], loss_inputs: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """`nll_mask` [2B, S]: weights of the tokens of the likelihood term, 0 in rejected sequences; `answer_tokens`
        [2B]: number of answer tokens; `pair_weights` [B]."""
        weights, mask = loss_inputs["pair_weights"], loss_inputs["loss_mask"]
        answer_tokens = mask.sum(dim=1)
        complete = (answer_tokens.view(2, -1) > 0).all(dim=0)
        counted = self.likelihood_mask(model_forward_inputs, loss_inputs)
        of_chosen = torch.cat([weights, torch.zeros_like(weights)])
        return {
            "nll_mask": counted * of_chosen[:, None],
            "answer_tokens": answer_tokens,
            "pair_weights": weights * complete,
        }

    def likelihood_mask(self, model_forward_inputs: Mapping[str, Tensor], loss_inputs: Mapping[str, Tensor]) -> Tensor:
        """Mask of the tokens that count in the likelihood term, here the answers, [2B, S]."""
        return loss_inputs["loss_mask"]

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and `nll_mask`."""
        return {**super().get_fields_and_seqdims(), "nll_mask": 1}

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> dict[str, float]:
        """The sum of the pairs' weights, and that of the weights of the likelihood term's tokens."""
        return {PREFERENCE: float(loss_inputs["pair_weights"].sum()), NLL: float(loss_inputs["nll_mask"].sum())}

    def policy_terms(
        self, loss_inputs: dict[str, Tensor], logits: Tensor, average: bool
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Metric]]:
        """Log-probabilities of the chosen and the rejected answers, [B] each, divided by their numbers of tokens if
        `average`; this rank's share of the likelihood term's sum, a scalar; and the metrics `nll_loss` and `entropy`
        over tokens."""
        counted = (loss_inputs["loss_mask"] != 0) | (loss_inputs["nll_mask"] != 0)
        log_probs, entropy = label_log_probs_and_entropy(
            logits, loss_inputs["labels"], counted, loss_inputs["token_weights"]
        )
        chosen, rejected = self.answer_log_probs(loss_inputs, log_probs)
        if average:
            of_chosen, of_rejected = loss_inputs["answer_tokens"].clamp(min=1).chunk(2)
            chosen, rejected = chosen / of_chosen, rejected / of_rejected
        nll = self.token_mean(-log_probs, loss_inputs["nll_mask"])
        return chosen, rejected, nll, {"nll_loss": (nll.detach(), loss_inputs["nll_mask"].sum()), "entropy": entropy}

    def loss_of_pairs(
        self,
        losses: Tensor,
        nll: Tensor,
        reported: Mapping[str, Tensor],
        of_tokens: Mapping[str, Metric],
        loss_inputs: Mapping[str, Tensor],
    ) -> LossOutput:
        """Both terms, from the pairs' losses [B] and the likelihood term's sum; metrics: weighted means over pairs of
        `reported`, and those of `policy_terms`."""
        weights = loss_inputs["pair_weights"]
        metrics = {**self.pair_metrics(reported, loss_inputs, weights), **of_tokens}
        return LossOutput({PREFERENCE: self.sequence_mean(weighted(losses, weights)), NLL: nll}, metrics)
