"""Base of flows on preference pairs: a prompt with a chosen and a rejected answer, collated as two sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_wrap.data.chat.encode import ChatTokens, encode_pair
from megatron_wrap.errors import DataError
from megatron_wrap.flow.shared.text import MegatronWrapGPTModelTextFlow
from megatron_wrap.metrics.metric import Metric, Total
from megatron_wrap.ops.log_probs import log_probs_and_entropy, token_log_probs


class MegatronWrapGPTModelPairFlow(MegatronWrapGPTModelTextFlow):
    """A sample is a pair (see `megatron_wrap.data.chat.encode.encode_pair`). A micro-batch of B pairs has 2B sequences,
    the chosen ones first. A pair's `weight`, 1 by default, is its weight in means over pairs."""

    console_metrics: ClassVar[Sequence[str]] = (
        "rewards/accuracies",
        "rewards/margins",
        "nll_loss",
        "truncated_samples",
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapGPTModelTextFlow.Config):
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
