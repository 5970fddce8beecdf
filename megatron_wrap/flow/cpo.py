"""Contrastive preference optimization (CPO), SimPO and AlphaPO of a GPT model, without a reference model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_wrap.flow.base import LossOutput
from megatron_wrap.flow.pairs import (
    MegatronWrapGPTModelPairFlow,
    label_log_probs,
    label_log_probs_and_entropy,
    weighted,
)
from megatron_wrap.metrics.metric import Metric

PREFERENCE, NLL = "preference", "nll"
"""The terms of the loss."""


class ReferenceFreeFlow(MegatronWrapGPTModelPairFlow):
    """A mean over pairs plus the negative log-likelihood of the chosen sequences, a mean over the tokens of `nll_mask`.

    Both are means over the whole step, whereas trl averages over each micro-batch and then over micro-batches: the two
    are equal with one micro-batch per step. A pair of which truncation leaves an answer without a token has no mean
    log-probability: its weight among the pairs is 0, its chosen sequence keeps its likelihood term.
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
        """[2B, S]: 1 on the tokens that count in the likelihood term, here the answers."""
        return loss_inputs["loss_mask"]

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and `nll_mask`."""
        return {**super().get_fields_and_seqdims(), "nll_mask": 1}

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> dict[str, float]:
        """The sum of the pairs' weights, and that of the weights of the likelihood term's tokens."""
        return {PREFERENCE: float(loss_inputs["pair_weights"].sum()), NLL: float(loss_inputs["nll_mask"].sum())}

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`chosen_log_probs` and `rejected_log_probs`, [B]: log-probability of each answer given its prompt."""
        log_probs = label_log_probs(model_forward_output, loss_inputs["labels"], loss_inputs["loss_mask"])
        chosen, rejected = self.answer_log_probs(loss_inputs, log_probs)
        return {"chosen_log_probs": chosen, "rejected_log_probs": rejected}

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


class MegatronWrapGPTModelCPOFlow(ReferenceFreeFlow):
    """Mean over pairs of a loss of the difference d between the log-probabilities of the chosen and of the rejected
    answer, plus `cpo_alpha` times the negative log-likelihood of the chosen answers' tokens. As in trl's CPOTrainer:

    - sigmoid: -log sigmoid(beta * d) (CPO, Xu et al., 2024, arXiv:2401.08417, equation 3); with `label_smoothing` e,
      (1 - e) times it, minus e * log sigmoid(-beta * d);
    - hinge: max(0, 1 - beta * d);
    - ipo: (d - 1 / (2 * beta))^2, with d of mean log-probabilities over an answer's tokens;
    - simpo: -log sigmoid(beta * d - simpo_gamma), with d of mean log-probabilities (SimPO, Meng et al., 2024,
      arXiv:2405.14734, equation 6, whose objective has `cpo_alpha` 0); smoothed as sigmoid.

    With `alpha` above or below 0, (1 - exp(-alpha * l)) / alpha replaces the log-probability l (AlphaPO, Gupta et al.,
    2025, arXiv:2501.03884).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapGPTModelPairFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
        """Loss of a pair: sigmoid (CPO), hinge, ipo or simpo. ipo and simpo take the mean log-probability over the
        tokens of an answer, sigmoid and hinge the sum, as trl does."""
        beta: float = 0.1
        """Factor of the difference between log-probabilities; above 0. SimPO's paper has 2 to 10."""
        label_smoothing: float = 0.0
        """Probability that a pair's labels are swapped, with sigmoid and simpo; at least 0 and below 0.5."""
        cpo_alpha: float = 1.0
        """Coefficient of the chosen answers' negative log-likelihood, a mean over the tokens of the step; 0 for SimPO
        alone. At least 0."""
        simpo_gamma: float = 0.5
        """Target margin of simpo, after the factor beta; at least 0."""
        alpha: float = 0.0
        """AlphaPO's transformation of log-probabilities; 0: none. SimPO with alpha is AlphaPO."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.beta <= 0:
                raise ValueError(f"beta is {self.beta}; it must be larger than 0")
            if not 0 <= self.label_smoothing < 0.5:
                raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and less than 0.5")
            if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
                raise ValueError(
                    f"label_smoothing is {self.label_smoothing}, but loss_type {self.loss_type} has none; set it to 0, "
                    "or loss_type to sigmoid or simpo"
                )
            for name in ("cpo_alpha", "simpo_gamma"):
                if getattr(self, name) < 0:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    supports_packing = True

    def get_loss_coefficients(self) -> dict[str, float]:
        """1 for the pairs, `cpo_alpha` for the likelihood term."""
        return {PREFERENCE: 1.0, NLL: self.flow_config.cpo_alpha}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of both terms. Metrics as in trl: weighted means over pairs of rewards (beta times the
        log-probability, transformed with `alpha`) and log-probabilities, as the loss takes them; `nll_loss`, and
        `entropy` over the tokens of all answers."""
        options = self.flow_config
        average = options.loss_type in ("ipo", "simpo")
        chosen, rejected, nll, of_tokens = self.policy_terms(loss_inputs, model_forward_output, average)
        scores = [self._transformed(chosen), self._transformed(rejected)]
        difference = scores[0] - scores[1]
        margins = options.beta * difference
        reported = {
            "rewards/chosen": options.beta * scores[0],
            "rewards/rejected": options.beta * scores[1],
            "rewards/margins": margins,
            "rewards/accuracies": (difference > 0).float(),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        return self.loss_of_pairs(self._pair_losses(difference), nll, reported, of_tokens, loss_inputs)

    def _transformed(self, log_probs: Tensor) -> Tensor:
        alpha = self.flow_config.alpha
        return -torch.expm1(-alpha * log_probs) / alpha if alpha else log_probs

    def _pair_losses(self, difference: Tensor) -> Tensor:
        options = self.flow_config
        scaled = options.beta * difference
        if options.loss_type == "hinge":
            return torch.relu(1 - scaled)
        if options.loss_type == "ipo":
            return (difference - 1 / (2 * options.beta)) ** 2
        if options.loss_type == "simpo":
            scaled = scaled - options.simpo_gamma
        smoothing = options.label_smoothing
        return -logsigmoid(scaled) * (1 - smoothing) - logsigmoid(-scaled) * smoothing
