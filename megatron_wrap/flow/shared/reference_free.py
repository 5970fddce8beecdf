"""Base of flows on preference pairs without a reference model: a preference term and a likelihood term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.pairs import (
    MegatronWrapGPTModelPairFlow,
    label_log_probs_and_entropy,
    weighted,
)
from megatron_wrap.metrics.metric import Metric

PREFERENCE, NLL = "preference", "nll"
"""The terms of the loss."""


class ReferenceFreeFlow(MegatronWrapGPTModelPairFlow):
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
