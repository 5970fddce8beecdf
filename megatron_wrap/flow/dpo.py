"""Direct preference optimization (DPO) of a GPT model on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_wrap.config.schema.keys import key
from megatron_wrap.errors import DataError
from megatron_wrap.flow.contract.base import FlowContext, LossOutput
from megatron_wrap.flow.shared.pairs import (
    PairFlow,
    label_log_probs_and_entropy,
    rewards_and_log_probs,
    weighted,
)
from megatron_wrap.flow.shared.preference_losses import (
    NLL,
    PAIR_LOSSES,
    SORTED_LOSSES,
    PairTerms,
    check_losses,
    divergence_scores,
    gradient_only,
    partners,
    smoothed,
)
from megatron_wrap.flow.shared.text import number_columns
from megatron_wrap.ops.log_probs import collision_entropy

_PAIRS = "pairs"
"""Term of the losses that are means over pairs, in addition to sft."""
REFERENCE_FIELDS = ("reference_chosen_log_probs", "reference_rejected_log_probs")


class MegatronWrapGPTModelDPOFlow(PairFlow):
    """Mean over pairs of a loss of the policy's and the reference's log-probabilities of both answers. The default is
    -log sigmoid(beta * (policy's margin - reference's margin)), where a margin is the log-probability of the chosen
    answer minus that of the rejected one (Rafailov et al., 2023, arXiv:2305.18290, equation 7); `loss_type` selects
    other losses (`shared/preference_losses.py`). A pair's `weight`, 1 by default, is its weight in the mean.

    A sample is a pair (see `megatron_wrap.data.chat.encode.encode_pair`). The reference's log-probabilities come from
    the model of `megatron_wrap.models.reference: copy`, or each sample contains them, as `wrap.forward` returns them,
    in `reference_chosen_log_probs` and `reference_rejected_log_probs`. A micro-batch of B pairs has 2B sequences, the
    chosen ones first.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(PairFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        beta: float = key(0.1, above=0)
        """Strength of the penalty for deviating from the reference model."""
        loss_type: str | list[str] = "sigmoid"
        """One loss, or a list for their weighted sum: sigmoid, sigmoid_norm, hinge, ipo, robust, exo_pair, nca_pair,
        bco_pair, sppo_hard, apo_zero, apo_down, discopop, aot, aot_unpaired (both sort over the whole step) or sft
        (a mean over the step's chosen tokens)."""
        loss_weights: tuple[float, ...] = ()
        """Factor of each loss of loss_type, in its order; []: 1 each."""
        label_smoothing: float = key(0.0, at_least=0, below=0.5)
        """Probability that a pair's labels are swapped, no smoothing of token targets. Used by sigmoid (not in trl
        1.x), robust, exo_pair (above 0), aot and aot_unpaired."""
        f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
        """Divergence from the reference that the losses of a difference of scores penalize."""
        f_alpha_divergence_coef: float = 0.5
        """Alpha of the alpha divergence."""
        ld_alpha: float = key(1.0, at_least=0, at_most=1)
        """Factor of log-probabilities of an answer's tokens beyond the length of the shorter answer
        (LD-DPO, arXiv:2409.06411)."""
        use_weighting: bool = False
        """Multiply each pair's loss by the policy's probabilities of both answers (WPO, arXiv:2406.11827)."""
        rpo_alpha: float = 0.0
        """Factor of the negative log-likelihood of the chosen answers that is added (arXiv:2404.19733), as a mean over
        the step's chosen tokens, not per answer as in the paper. trl 1.x has sft in loss_type instead."""
        discopop_tau: float = key(0.05, above=0)
        """Temperature of discopop's share of the exponential loss."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_losses(
                self.names, self.loss_weights, self.f_divergence_type, self.use_weighting, self.label_smoothing
            )

        @property
        def names(self) -> list[str]:
            """The losses of `loss_type`."""
            return self.loss_type if isinstance(self.loss_type, list) else [self.loss_type]

        @property
        def losses(self) -> dict[str, float]:
            """Loss -> its factor; `rpo_alpha` is a factor of sft."""
            losses = dict(zip(self.names, self.loss_weights or [1.0] * len(self.names), strict=True))
            if self.rpo_alpha:
                losses[NLL] = losses.get(NLL, 0.0) + self.rpo_alpha
            return losses

    def __init__(self, flow_config: Any, context: FlowContext) -> None:
        super().__init__(flow_config, context)
        self._losses: dict[str, float] = flow_config.losses
        if self._losses.keys() & set(SORTED_LOSSES):
            self.step_values_from = "outputs"

    supports_packing = True

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields; with `ld_alpha` also `token_factors`."""
        return {**super().get_fields_and_seqdims(), "token_factors": 1}

    def collate_pairs(
        self, samples: list[Mapping[str, Any]], model_forward_inputs: dict[str, Tensor], loss_inputs: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """`answer_lengths` [2B], and the reference's log-probabilities [B] if the samples contain them; with `ld_alpha`
        `token_factors` [2B, S].

        Raises:
            DataError: only some of the samples contain reference log-probabilities.
        """
        mask = loss_inputs["loss_mask"]
        added = {"answer_lengths": mask.sum(dim=1), **number_columns(samples, REFERENCE_FIELDS)}
        if self.flow_config.ld_alpha != 1:
            added["token_factors"] = _length_factors(mask, self.flow_config.ld_alpha)
        return added

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float | dict[str, float]:
        """Sum of the weights of the micro-batch's pairs, each 1 by default; with sft or `rpo_alpha` two terms, and for
        sft the sum over the chosen answers' tokens."""
        weights = loss_inputs["pair_weights"]
        if NLL not in self._losses:
            return float(weights.sum())
        tokens = float((weights * loss_inputs["answer_lengths"].chunk(2)[0]).sum())
        return {NLL: tokens} if len(self._losses) == 1 else {_PAIRS: float(weights.sum()), NLL: tokens}

    def has_loss(self, loss_inputs: Mapping[str, Tensor]) -> bool:
        """Whether a token has a loss; truncation may remove the answers."""
        return bool(loss_inputs["token_weights"].any())

    def get_loss_coefficients(self) -> dict[str, float]:
        """The factor of sft; those of the other losses are within their sum."""
        return {NLL: self._losses[NLL]} if NLL in self._losses else {}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the weighted sum over pairs; the metrics are weighted means over pairs, and `entropy`
        over the answers' tokens.

        Raises:
            DataError: there are no reference log-probabilities.
        """
        token_log_probs, entropy = label_log_probs_and_entropy(
            model_forward_output, loss_inputs["labels"], loss_inputs["loss_mask"], loss_inputs["token_weights"]
        )
        chosen, rejected = self.answer_log_probs(loss_inputs, token_log_probs)
        chosen_ratios, rejected_ratios = _log_ratios(loss_inputs, chosen, rejected)
        beta, weights = self.flow_config.beta, loss_inputs["pair_weights"]
        reported = rewards_and_log_probs(beta * chosen_ratios, beta * rejected_ratios, chosen, rejected)
        metrics = {**self.pair_metrics(reported, loss_inputs, weights), "entropy": entropy}
        sums: dict[str, Tensor] = {}
        if self._losses.keys() != {NLL}:
            losses = self._pair_losses(loss_inputs, chosen_ratios, rejected_ratios)
            if self.flow_config.use_weighting:
                losses = losses * self._pair_probabilities(loss_inputs, token_log_probs, model_forward_output)
            total = weighted(losses, weights) + self._sorted_losses(loss_inputs, chosen_ratios, rejected_ratios)
            sums[_PAIRS] = self.sequence_mean(total)
        if NLL in self._losses:
            answers, _ = super().answer_log_probs(loss_inputs, token_log_probs)
            sums[NLL] = -self.sequence_mean(weighted(answers, weights))
            tokens = (weights * loss_inputs["answer_lengths"].chunk(2)[0]).sum()
            metrics["nll_loss"] = (sums[NLL].detach() * self.context.cp_size, tokens)
        return LossOutput(sums if NLL in sums else sums[_PAIRS], metrics)

    def _pair_losses(self, loss_inputs: Mapping[str, Tensor], chosen_ratios: Tensor, rejected_ratios: Tensor) -> Tensor:
        """Weighted sum of the losses of `PAIR_LOSSES` for each pair, [B]."""
        config = self.flow_config
        divergence, alpha = config.f_divergence_type, config.f_alpha_divergence_coef
        chosen_lengths, rejected_lengths = loss_inputs["answer_lengths"].clamp(min=1).chunk(2)
        terms = PairTerms(
            chosen_ratios=chosen_ratios,
            rejected_ratios=rejected_ratios,
            chosen_scores=divergence_scores(chosen_ratios, divergence, alpha),
            rejected_scores=divergence_scores(rejected_ratios, divergence, alpha),
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            discopop_tau=config.discopop_tau,
        )
        losses = torch.zeros_like(chosen_ratios)
        for name, factor in self._losses.items():
            if name in PAIR_LOSSES:
                losses = losses + factor * PAIR_LOSSES[name](terms)
        return losses

    def _sorted_losses(
        self, loss_inputs: Mapping[str, Tensor], chosen_ratios: Tensor, rejected_ratios: Tensor
    ) -> Tensor:
        """Each pair's share of aot and aot_unpaired, with its weight, [B]. Gradients flow through the pair's own value,
        and not through the value of the same rank in the other sort; each rank counts once."""
        beta, smoothing, weights = self.flow_config.beta, self.flow_config.label_smoothing, loss_inputs["pair_weights"]
        total = torch.zeros_like(chosen_ratios)
        if "aot" in self._losses:
            reference = loss_inputs["reference_chosen_log_probs"] - loss_inputs["reference_rejected_log_probs"]
            policy = chosen_ratios - rejected_ratios + reference
            losses = smoothed(beta * (policy - _of_pairs(loss_inputs, "aot_reference")), smoothing)
            total = total + self._losses["aot"] * weighted(losses, weights)
        if "aot_unpaired" in self._losses:
            losses = smoothed(beta * (chosen_ratios - _of_pairs(loss_inputs, "aot_rejected")), smoothing)
            others = smoothed(beta * (_of_pairs(loss_inputs, "aot_chosen") - rejected_ratios), smoothing)
            rejected_part = weighted(gradient_only(others), _of_pairs(loss_inputs, "aot_weights"))
            total = total + self._losses["aot_unpaired"] * (weighted(losses, weights) + rejected_part)
        return total

    def calculate_step_values(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor | None
    ) -> dict[str, Tensor]:
        """The values that aot and aot_unpaired sort over the step, [B] each."""
        assert model_forward_output is not None
        policy = self.calculate_outputs(loss_inputs, model_forward_output)
        chosen, rejected = policy["chosen_log_probs"], policy["rejected_log_probs"]
        chosen_ratios, rejected_ratios = _log_ratios(loss_inputs, chosen, rejected)
        reference = loss_inputs["reference_chosen_log_probs"] - loss_inputs["reference_rejected_log_probs"]
        return {
            "policy": chosen - rejected,
            "reference": reference,
            "chosen": chosen_ratios,
            "rejected": rejected_ratios,
            "weights": loss_inputs["pair_weights"],
        }

    def reduce_step_values(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Values at each pair's rank in the other sort, over the step, [N] each: of the reference's ratios, of the
        rejected answers, and of the chosen ones; and the weight of the latter."""
        chosen, rejected, weights = values["chosen"], values["rejected"], values["weights"]
        chosen_indices = partners(rejected, chosen, weights)
        return {
            "aot_reference": values["reference"][partners(values["policy"], values["reference"], weights)],
            "aot_rejected": rejected[partners(chosen, rejected, weights)],
            "aot_chosen": chosen[chosen_indices],
            "aot_weights": weights[chosen_indices],
        }

    def _pair_probabilities(self, loss_inputs: Mapping[str, Tensor], token_log_probs: Tensor, logits: Tensor) -> Tensor:
        """WPO's weight of each pair, [B]: the product over both answers of exp(mean over tokens of log p - log sum p^2)
        (Zhou et al., 2024, arXiv:2406.11827, equation 2); detached."""
        mask = loss_inputs["loss_mask"]
        aligned = torch.where(mask != 0, token_log_probs.detach() + collision_entropy(logits), 0.0)
        means = self.sum_per_sequence(aligned, loss_inputs) / loss_inputs["answer_lengths"].clamp(min=1)
        chosen, rejected = means.exp().chunk(2)
        return chosen * rejected

    def answer_log_probs(self, loss_inputs: Mapping[str, Tensor], log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """See the base class; with `ld_alpha` the log-probabilities of later tokens have its factor."""
        if "token_factors" in loss_inputs:
            log_probs = log_probs * loss_inputs["token_factors"]
        return super().answer_log_probs(loss_inputs, log_probs)


def _log_ratios(loss_inputs: Mapping[str, Tensor], chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """The policy's log-probabilities minus the reference's, of the chosen and of the rejected answers."""
    if REFERENCE_FIELDS[0] not in loss_inputs:
        raise DataError(
            "gpt_dpo needs a reference model's log-probabilities: set megatron_wrap.models.reference: copy, or "
            f"add {' and '.join(REFERENCE_FIELDS)} to each sample"
        )
    return chosen - loss_inputs[REFERENCE_FIELDS[0]], rejected - loss_inputs[REFERENCE_FIELDS[1]]


def _of_pairs(loss_inputs: Mapping[str, Tensor], name: str) -> Tensor:
    """Values of the micro-batch's pairs, [B], from a statistic [N] of the whole step."""
    return loss_inputs[f"step_{name}"][loss_inputs["step_indices"]]


def _length_factors(mask: Tensor, alpha: float) -> Tensor:
    """Factor of each token, [2B, S]: 1, and `alpha` on an answer's tokens beyond the length of the shorter answer of
    its pair."""
    shared = mask.sum(dim=1).view(2, -1).amin(dim=0).repeat(2)
    return torch.where(mask.cumsum(dim=1) > shared[:, None], alpha, 1.0)
