"""Contrastive preference optimization (CPO), SimPO and AlphaPO of a GPT model, without a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_wrap.config.schema.keys import key
from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.pairs import (
    NLL,
    PREFERENCE,
    PairFlow,
    ReferenceFreeFlow,
    rewards_and_log_probs,
)
from megatron_wrap.flow.shared.preference_losses import smoothed


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
    class Config(PairFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
        """Loss of a pair: sigmoid (CPO), hinge, ipo or simpo. ipo and simpo take the mean log-probability over the
        tokens of an answer, sigmoid and hinge the sum, as trl does."""
        beta: float = key(0.1, above=0)
        """Factor of the difference between log-probabilities. SimPO's paper has 2 to 10."""
        label_smoothing: float = key(0.0, at_least=0, below=0.5)
        """Probability that a pair's labels are swapped, with sigmoid and simpo; no smoothing of token targets."""
        cpo_alpha: float = key(1.0, at_least=0)
        """Coefficient of the chosen answers' negative log-likelihood, a mean over the tokens of the step; 0 for SimPO
        alone."""
        simpo_gamma: float = key(0.5, at_least=0)
        """Target margin of simpo, after the factor beta."""
        alpha: float = 0.0
        """AlphaPO's transformation of log-probabilities; 0: none. SimPO with alpha is AlphaPO."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
                raise ValueError(
                    f"label_smoothing is {self.label_smoothing}, but loss_type {self.loss_type} has none; set it to 0, "
                    "or loss_type to sigmoid or simpo"
                )

    supports_packing = True

    def get_loss_coefficients(self) -> dict[str, float]:
        """1 for the pairs, `cpo_alpha` for the likelihood term."""
        return {PREFERENCE: 1.0, NLL: self.flow_config.cpo_alpha}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of both terms. Metrics as in trl: weighted means over pairs of rewards (beta times the
        log-probability, transformed with `alpha`) and of the log-probabilities that the loss uses; `nll_loss`, and
        `entropy` over the tokens of all answers."""
        options = self.flow_config
        average = options.loss_type in ("ipo", "simpo")
        chosen, rejected, nll, of_tokens = self.policy_terms(loss_inputs, model_forward_output, average)
        chosen_scores, rejected_scores = self._transformed(chosen), self._transformed(rejected)
        reported = rewards_and_log_probs(options.beta * chosen_scores, options.beta * rejected_scores, chosen, rejected)
        losses = self._pair_losses(chosen_scores - rejected_scores)
        return self.loss_of_pairs(losses, nll, reported, of_tokens, loss_inputs)

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
        return smoothed(scaled, options.label_smoothing)
