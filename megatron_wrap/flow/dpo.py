"""Direct preference optimization (DPO) of a GPT model on pairs of a chosen and a rejected answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_wrap.data.chat import ChatTokens
from megatron_wrap.data.pairs import encode_pair
from megatron_wrap.errors import DataError
from megatron_wrap.flow.base import LossOutput
from megatron_wrap.flow.text import ENCODED, MegatronWrapGPTModelTextFlow
from megatron_wrap.metrics.metric import Total
from megatron_wrap.ops.log_probs import token_log_probs

REFERENCE_FIELDS = ("reference_chosen_log_probs", "reference_rejected_log_probs")


class MegatronWrapGPTModelDPOFlow(MegatronWrapGPTModelTextFlow):
    """Mean over pairs of -log sigmoid(beta * (policy's margin - reference's margin)), where a margin is the
    log-probability of the chosen answer minus that of the rejected one (Rafailov et al., 2023, arXiv:2305.18290,
    equation 7); with `label_smoothing` its conservative form (Mitchell, 2023), as in trl's loss_type "sigmoid". A
    pair's `weight`, 1 by default, is its weight in the mean.

    A sample is a pair (see `megatron_wrap.data.pairs.encode_pair`). The reference's log-probabilities come from the
    model of `megatron_wrap.models.reference: copy`, or each sample contains them, as `wrap.forward` returns them, in
    `reference_chosen_log_probs` and `reference_rejected_log_probs`. A micro-batch of B pairs has 2B sequences, the
    chosen ones first.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapGPTModelTextFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        beta: float = 0.1
        """Strength of the penalty for deviating from the reference model; above 0."""
        label_smoothing: float = 0.0
        """Probability that a pair's labels are swapped; at least 0 and below 0.5."""

        def __post_init__(self) -> None:
            if self.beta <= 0:
                raise ValueError(f"beta is {self.beta}; it must be larger than 0")
            if not 0 <= self.label_smoothing < 0.5:
                raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and less than 0.5")
            if self.loss_on != "assistant":
                raise ValueError(f"loss_on is {self.loss_on}; a preference pair has its loss on the answers, assistant")

    supports_packing = True

    def prepare_sample(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The sample with the `ChatTokens` of its chosen and its rejected sequence as `encoded`."""
        pair = self._encoded(sample)
        for tokens in pair:
            self.check_length(tokens)
        return {**sample, ENCODED: pair}

    def get_sample_lengths(self, sample: Mapping[str, Any]) -> list[int]:
        """Those of the chosen and the rejected sequence, see `length_of`."""
        return [self.length_of(tokens) for tokens in self._encoded(sample)]

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Up to B pairs, prepared or not, as 2B sequences [2B, S], the chosen ones first; `truncated`, `pair_weights`
        and the reference's log-probabilities, if the samples contain them, are [B].

        Raises:
            DataError: only some of the samples contain reference log-probabilities.
        """
        samples = list(itertools.islice(iterator, self.micro_batch_size))
        pairs = [self._encoded(sample) for sample in samples]
        sequences = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        model_forward_inputs, loss_inputs = self.collate_tokens(sequences)
        cut = loss_inputs.pop("truncated").view(2, len(pairs)).amax(dim=0)
        weights = torch.tensor([chosen.weight for chosen, _ in pairs])
        added = {"truncated": cut, "pair_weights": weights, **_given_reference(samples)}
        return model_forward_inputs, {**loss_inputs, **added}

    def _encoded(self, sample: Mapping[str, Any]) -> tuple[ChatTokens, ChatTokens]:
        return sample[ENCODED] if ENCODED in sample else encode_pair(self.context.tokenizer, sample)

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float:
        """Sum of the weights of the micro-batch's pairs, each 1 by default."""
        return float(loss_inputs["pair_weights"].sum())

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the weighted sum over pairs; the metrics are weighted means over pairs.

        Raises:
            DataError: there are no reference log-probabilities.
        """
        if REFERENCE_FIELDS[0] not in loss_inputs:
            raise DataError(
                "gpt_dpo needs a reference model's log-probabilities: set megatron_wrap.models.reference: copy, or "
                f"add {' and '.join(REFERENCE_FIELDS)} to each sample"
            )
        beta, smoothing = self.flow_config.beta, self.flow_config.label_smoothing
        chosen, rejected = self._answer_log_probs(loss_inputs, model_forward_output)
        chosen_rewards = beta * (chosen - loss_inputs["reference_chosen_log_probs"])
        rejected_rewards = beta * (rejected - loss_inputs["reference_rejected_log_probs"])
        margins = chosen_rewards - rejected_rewards
        losses = -logsigmoid(margins) * (1 - smoothing) - logsigmoid(-margins) * smoothing
        reported = {
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/margins": margins,
            "rewards/accuracies": (margins > 0).float(),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        weights = loss_inputs["pair_weights"]
        metrics = {
            name: (_weighted(values.detach(), weights).sum(), weights.sum()) for name, values in reported.items()
        }
        truncated = Total(self.sequence_mean(loss_inputs["truncated"]))
        return LossOutput(self.sequence_mean(_weighted(losses, weights)), {**metrics, "truncated_samples": truncated})

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`chosen_log_probs` and `rejected_log_probs`, [B]: log-probability of each answer given its prompt."""
        chosen, rejected = self._answer_log_probs(loss_inputs, model_forward_output)
        return {"chosen_log_probs": chosen, "rejected_log_probs": rejected}

    def _answer_log_probs(self, loss_inputs: Mapping[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the chosen and the rejected answers, [B] each, equal on every context-parallel rank."""
        mask = loss_inputs["loss_mask"]
        log_probs = torch.where(mask != 0, token_log_probs(logits, loss_inputs["labels"]), 0.0)
        chosen, rejected = self.sum_per_sequence(log_probs * mask, loss_inputs).chunk(2)
        return chosen, rejected


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """[B] values times their weights; of weight 0 also inf and nan are 0."""
    return torch.where(weights != 0, values * weights, torch.zeros_like(values))


def _given_reference(samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Columns [B] of the reference's log-probabilities; empty if no sample contains them."""
    given = [[sample.get(name) for sample in samples] for name in REFERENCE_FIELDS]
    values = [value for column in given for value in column]
    if all(value is None for value in values):
        return {}
    if any(value is None for value in values):
        raise DataError(
            f"only some samples contain {' and '.join(REFERENCE_FIELDS)}; add both to every sample or remove them"
        )
    return {
        name: torch.tensor(column, dtype=torch.float32) for name, column in zip(REFERENCE_FIELDS, given, strict=True)
    }
