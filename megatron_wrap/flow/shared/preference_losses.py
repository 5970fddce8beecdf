"""Losses on pairs of a chosen and a rejected answer: pure functions of [B] tensors, one value for each pair.

Names, formulas and conventions are those of trl 1.16.0 (`trl/trainer/dpo_trainer.py`) unless a docstring states
another. A log-ratio is the policy's log-probability of an answer minus the reference's, summed over the answer's
tokens. A score is f'(policy / reference) of the f-divergence; for reverse KL it is the log-ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_wrap.metrics.number_format import counted
from megatron_wrap.nearest_names import did_you_mean

_LARGEST_EXPONENT = 80.0  # exp(80) is finite in fp32


@dataclass(frozen=True)
class PairTerms:
    """Values of B pairs that the losses use; tensors [B]."""

    chosen_ratios: Tensor
    """Log-ratios of the chosen answers."""
    rejected_ratios: Tensor
    chosen_scores: Tensor
    rejected_scores: Tensor
    chosen_lengths: Tensor
    """Number of tokens of the chosen answer with a loss, at least 1."""
    rejected_lengths: Tensor
    beta: float
    label_smoothing: float
    discopop_tau: float

    @property
    def margins(self) -> Tensor:
        """beta * (chosen score - rejected score)."""
        return self.beta * (self.chosen_scores - self.rejected_scores)

    @property
    def mean_margins(self) -> Tensor:
        """The difference of the scores per token, without beta."""
        return self.chosen_scores / self.chosen_lengths - self.rejected_scores / self.rejected_lengths


def smoothed(margins: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid of the margin, with probability `smoothing` that the labels are swapped (Mitchell, 2023)."""
    return -logsigmoid(margins) * (1 - smoothing) - logsigmoid(-margins) * smoothing


def sigmoid(terms: PairTerms) -> Tensor:
    """DPO (Rafailov et al., 2023, arXiv:2305.18290, equation 7). With `label_smoothing` its conservative form, which
    trl 1.x does not apply here."""
    return smoothed(terms.margins, terms.label_smoothing)


def sigmoid_norm(terms: PairTerms) -> Tensor:
    """DPO on scores per token (trl's `sigmoid_norm`), without label smoothing."""
    return -logsigmoid(terms.beta * terms.mean_margins)


def hinge(terms: PairTerms) -> Tensor:
    """SLiC (Zhao et al., 2023, arXiv:2305.10425), as normalized by Liu et al., 2023 (RSO, arXiv:2309.06657)."""
    return torch.relu(1 - terms.margins)


def ipo(terms: PairTerms) -> Tensor:
    """IPO (Azar et al., 2023, arXiv:2310.12036, equation 17) on scores per token; beta is the paper's tau."""
    return (terms.mean_margins - 1 / (2 * terms.beta)) ** 2


def robust(terms: PairTerms) -> Tensor:
    """Robust DPO (Chowdhury et al., 2024, arXiv:2403.00409): unbiased if labels are swapped with `label_smoothing`."""
    rate = terms.label_smoothing
    return (-logsigmoid(terms.margins) * (1 - rate) + logsigmoid(-terms.margins) * rate) / (1 - 2 * rate)


def exo_pair(terms: PairTerms) -> Tensor:
    """EXO (Ji et al., 2024, arXiv:2402.00856, equation 16): KL from (1 - eps, eps) to the policy's preference."""
    rate, margins = terms.label_smoothing, terms.margins
    chosen = torch.sigmoid(margins) * (logsigmoid(margins) - math.log1p(-rate))
    return chosen + torch.sigmoid(-margins) * (logsigmoid(-margins) - math.log(rate))


def nca_pair(terms: PairTerms) -> Tensor:
    """NCA (Chen et al., 2024, arXiv:2402.05369) for a pair."""
    chosen, rejected = terms.beta * terms.chosen_ratios, terms.beta * terms.rejected_ratios
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(terms: PairTerms) -> Tensor:
    """BCO (Jung et al., 2024, arXiv:2404.04656) for a pair, without the running mean of the reward."""
    return -logsigmoid(terms.beta * terms.chosen_ratios) - logsigmoid(-terms.beta * terms.rejected_ratios)


def sppo_hard(terms: PairTerms) -> Tensor:
    """SPPO (Wu et al., 2024, arXiv:2405.00675, equation 4.7) with win probabilities 1 and 0."""
    half = 0.5 / terms.beta
    return (terms.chosen_ratios - half) ** 2 + (terms.rejected_ratios + half) ** 2


def apo_zero(terms: PairTerms) -> Tensor:
    """APO-zero (D'Oosterlinck et al., 2024, arXiv:2408.06266, equation 7)."""
    chosen, rejected = terms.beta * terms.chosen_ratios, terms.beta * terms.rejected_ratios
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def apo_down(terms: PairTerms) -> Tensor:
    """APO-down (D'Oosterlinck et al., 2024, arXiv:2408.06266, equation 8)."""
    chosen, rejected = terms.beta * terms.chosen_ratios, terms.beta * terms.rejected_ratios
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - rejected)


def discopop(terms: PairTerms) -> Tensor:
    """DiscoPOP (Lu et al., 2024, arXiv:2406.08414, equation 5)."""
    margins = terms.margins
    share = torch.sigmoid(margins / terms.discopop_tau)
    return -logsigmoid(margins) * (1 - share) + torch.exp(-margins) * share


PAIR_LOSSES: Mapping[str, Callable[[PairTerms], Tensor]] = {
    function.__name__: function
    for function in (
        sigmoid,
        sigmoid_norm,
        hinge,
        ipo,
        robust,
        exo_pair,
        nca_pair,
        bco_pair,
        sppo_hard,
        apo_zero,
        apo_down,
        discopop,
    )
}
"""Losses that depend on a single pair."""
SORTED_LOSSES = ("aot", "aot_unpaired")
"""Losses on values sorted over the whole step (AOT: Melnyk et al., 2024, arXiv:2406.05882)."""
NLL = "sft"
"""Negative log-likelihood of the chosen answers, a mean over their tokens in the whole step."""
LOSS_TYPES = (*PAIR_LOSSES, *SORTED_LOSSES, NLL)
SCORE_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", NLL)
"""Losses that are defined for other divergences than reverse KL: those of a difference of scores, in which the
normalizer of the reparameterization cancels."""


def check_losses(
    names: Sequence[str], weights: Sequence[float], divergence: str, use_weighting: bool, label_smoothing: float
) -> None:
    """Raise ValueError for losses that do not exist, or do not fit the other options of `gpt_dpo`."""
    for name in names:
        if name not in LOSS_TYPES:
            hint = did_you_mean(name, LOSS_TYPES) or f"; choose from {', '.join(LOSS_TYPES)}"
            raise ValueError(f"loss_type {name!r} is unknown{hint}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"loss_type is {list(names)}; name at least one loss, and no loss twice")
    if weights and len(weights) != len(names):
        raise ValueError(
            f"loss_weights has {counted(len(weights), 'value')} for {counted(len(names), 'loss')} in loss_type; "
            "write one for each loss"
        )
    others = [name for name in names if name not in SCORE_LOSSES]
    if divergence != "reverse_kl" and others:
        raise ValueError(
            f"f_divergence_type is {divergence}, but {others[0]} is defined for reverse_kl only; another divergence is "
            f"possible for {', '.join(SCORE_LOSSES)}"
        )
    if use_weighting and set(names) & {*SORTED_LOSSES, NLL}:
        raise ValueError("use_weighting weights single pairs; remove aot, aot_unpaired and sft from loss_type")
    if "exo_pair" in names and not label_smoothing:
        raise ValueError("exo_pair needs a label_smoothing above 0; its paper uses 1e-3")


def divergence_scores(log_ratios: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(t) of an f-divergence at t = exp(log-ratio) (Wang et al., 2024, arXiv:2309.16240, table 1).

    Args:
        divergence: reverse_kl, forward_kl, js_divergence or alpha_divergence.
        alpha: parameter of the alpha-divergence; 1 gives the reverse KL.
    """
    if divergence == "forward_kl":
        return 1 - torch.exp(-log_ratios)
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(log_ratios)
    if divergence == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
        return (torch.exp(((alpha - 1) * log_ratios).clamp(max=_LARGEST_EXPONENT)) - 1) / (alpha - 1)
    return log_ratios


def partners(values: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """For each value, the index in `others` of the value with the same rank, [N], in ascending sorts of both over the
    step. Values of weight 0 are the last of both sorts; equal values are in the order of the batch."""
    order, order_of_others = (
        torch.where(weights != 0, unsorted, torch.inf).sort(stable=True).indices for unsorted in (values, others)
    )
    indices = torch.empty_like(order)
    indices[order] = order_of_others
    return indices


def gradient_only(values: Tensor) -> Tensor:
    """Zeros with the gradient of `values`."""
    return values - values.detach()
