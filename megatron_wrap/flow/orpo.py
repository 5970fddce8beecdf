"""Odds ratio preference optimization (ORPO) of a GPT model: fine-tuning and preferences without a reference model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_wrap.config.schema.keys import key
from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.pairs import (
    NLL,
    PREFERENCE,
    PairFlow,
    ReferenceFreeFlow,
    rewards_and_log_probs,
)


class MegatronWrapGPTModelORPOFlow(ReferenceFreeFlow):
    """Negative log-likelihood of the chosen sequences plus `beta` times the mean over pairs of -log sigmoid(log odds of
    the chosen answer - log odds of the rejected one), with odds p / (1 - p) of p = exp(mean log-probability of the
    answer's tokens) (Hong et al., 2024, arXiv:2403.07691, equations 4 to 7).

    The likelihood term is a mean over the tokens of prompt and answer, as in trl's ORPOTrainer and the paper's code.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(PairFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        beta: float = key(0.1, above=0)
        """Coefficient of the odds ratio's loss, the paper's lambda."""

    supports_packing = True

    def likelihood_mask(self, model_forward_inputs: Mapping[str, Tensor], loss_inputs: Mapping[str, Tensor]) -> Tensor:
        """Mask of all tokens but padding, [2B, S]."""
        return model_forward_inputs["attention_mask"].float()

    def get_loss_coefficients(self) -> dict[str, float]:
        """`beta` for the pairs, 1 for the likelihood term."""
        return {PREFERENCE: self.flow_config.beta, NLL: 1.0}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of both terms. Metrics as in trl: weighted means over pairs of rewards (beta times the mean
        log-probability), mean log-probabilities, `log_odds_chosen` (difference of log odds) and `log_odds_ratio` (its
        log sigmoid); `nll_loss`, and `entropy` over the tokens of all answers."""
        beta = self.flow_config.beta
        chosen, rejected, nll, of_tokens = self.policy_terms(loss_inputs, model_forward_output, average=True)
        difference = log_odds(chosen) - log_odds(rejected)
        log_ratio = logsigmoid(difference)
        reported = rewards_and_log_probs(beta * chosen, beta * rejected, chosen, rejected)
        reported |= {"log_odds_chosen": difference, "log_odds_ratio": log_ratio}
        return self.loss_of_pairs(-log_ratio, nll, reported, of_tokens, loss_inputs)


def log_odds(log_prob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, [B]; exact also for p near 0 and near 1 (Maechler, 2012, "Accurately computing
    log(1 - exp(-|a|))"). p is taken as at most 1 - 1.2e-7, the largest number below 1 in fp32, so it is finite."""
    below = log_prob.clamp(max=-torch.finfo(torch.float32).eps)
    small = below.clamp(max=-0.6931)
    complement = torch.where(below < -0.6931, torch.log1p(-small.exp()), torch.log(-torch.expm1(below)))
    return below - complement
