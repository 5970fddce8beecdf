"""Losses of policy optimization: pure functions of tensors, one value for each token or sequence; and advantages of
responses relative to their group.

Names, formulas and conventions are those of trl 1.16.0 (`trl/trainer/grpo_trainer.py`) unless a docstring states
another. A ratio is the policy's probability of a token divided by that of the policy that the update started from; the
ratio of a sequence is the geometric mean over its tokens. Ratios, advantages and log-probabilities have one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_wrap.errors import DataError

LARGEST_LOG_RATIO = 20.0
"""Clamp of the log-ratio with `kl_clamp`, from verl and NeMo-RL."""
LARGEST_KL = 10.0
"""Clamp of the estimate with `kl_clamp`, from verl and NeMo-RL."""


def clipped(
    ratios: Tensor,
    advantages: Tensor,
    lowest: float,
    highest: float,
    delta: float | None = None,
    clip_ratio_c: float | None = None,
) -> Tensor:
    """-min(ratio A, clip(ratio, lowest, highest) A) (PPO: Schulman et al., 2017, arXiv:1707.06347, equation 7; with
    another distance from 1 above than below: DAPO, arXiv:2503.14476).

    Args:
        delta: upper limit of the ratio in the first product (INTELLECT-2, arXiv:2505.07291).
        clip_ratio_c: where A < 0, the loss is at most -clip_ratio_c A (dual clip: Ye et al., 2020, arXiv:1912.09729;
            as in verl).
    """
    limited = ratios.clamp(lowest, highest)
    losses = -torch.min((ratios if delta is None else ratios.clamp(max=delta)) * advantages, limited * advantages)
    if clip_ratio_c is None:
        return losses
    return torch.where(advantages < 0, torch.min(losses, -clip_ratio_c * advantages), losses)


def cispo(ratios: Tensor, advantages: Tensor, log_probs: Tensor, lowest: float | None, highest: float) -> Tensor:
    """-clamp(ratio, lowest, highest) A log p, without a gradient of the ratio (MiniMax-M1, arXiv:2506.13585)."""
    return -ratios.detach().clamp(min=lowest, max=highest) * advantages * log_probs


def sapo(ratios: Tensor, advantages: Tensor, temperature_pos: float, temperature_neg: float) -> Tensor:
    """-4 / t sigmoid(t (ratio - 1)) A, with t of positive or of other advantages (SAPO, arXiv:2511.20347)."""
    temperatures = torch.where(advantages > 0, temperature_pos, temperature_neg)
    return -torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures * advantages


def kl_estimates(log_probs: Tensor, reference: Tensor, estimator: str, clamp: bool = False) -> Tensor:
    """Estimates of KL(policy || reference) from sampled tokens (Schulman, 2020, "Approximating KL divergence").

    Args:
        estimator: k1, log p - log p_ref; k2, half its square; k3, exp(log p_ref - log p) - 1 - (log p_ref - log p).
        clamp: clamp k3 as in verl and NeMo-RL: the log-ratio to [-20, 20], then the estimate to [-10, 10].
    """
    difference = reference - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if clamp:
        difference = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    estimates = torch.exp(difference) - difference - 1
    return estimates.clamp(-LARGEST_KL, LARGEST_KL) if clamp else estimates


def rollout_weights(log_ratios: Tensor, rule: str, lowest: float | None, highest: float | None) -> Tensor:
    """Importance weights from the rollout's policy to the one that the update started from, as in trl.

    Args:
        log_ratios: log-probability of the latter minus the rollout's, of a token or summed over a sequence.
        rule: ends with truncate (clamp to the limits) or mask (0 outside of them).
    """
    ratios = torch.exp(log_ratios)
    if rule.endswith("truncate"):
        return ratios if lowest is None and highest is None else ratios.clamp(min=lowest, max=highest)
    outside = torch.zeros_like(ratios, dtype=torch.bool)
    if lowest is not None:
        outside |= ratios < lowest
    if highest is not None:
        outside |= ratios > highest
    return ratios.masked_fill(outside, 0.0)


def highest_values(values: Tensor, counted: Tensor, share: float) -> Tensor:
    """Mask of the values that are at least the quantile 1 - `share` of the counted values, interpolated linearly (Wang
    et al., 2025, arXiv:2506.01939); bool, False where not counted."""
    sorted_values = values[counted].sort().values
    if not len(sorted_values):
        return torch.zeros_like(counted)
    rank = (1 - share) * (len(sorted_values) - 1)
    below, above = sorted_values[int(rank)], sorted_values[min(int(rank) + 1, len(sorted_values) - 1)]
    return (values >= torch.lerp(below, above, rank - int(rank))) & counted


STD_EPSILON = 1e-4
"""Added to the standard deviation that advantages are divided by."""


def number_groups(names: Sequence[int | str | None]) -> list[int]:
    """The number of each sample's group; groups are numbered from 0 in the order of their first samples."""
    numbers: dict[int | str | None, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def check_groups(groups: Sequence[int], scale: str) -> None:
    """Raise `DataError` for a group, or a batch, of one response whose standard deviation is needed.

    Args:
        groups: group number of each sample of the step.
        scale: samples whose standard deviation divides the advantages: group, batch or none.
    """
    sizes = Counter(groups)
    single = [index for index, group in enumerate(groups) if sizes[group] == 1]
    if scale == "group" and single:
        raise DataError(
            f"sample {single[0]} of a batch of {len(groups)} is the only one of its group, so its reward has no "
            "standard deviation; put all responses of a group in one batch, or set scale_rewards to batch or none"
        )
    if scale == "batch" and len(groups) == 1:
        raise DataError("a batch of one sample has no standard deviation of rewards; set scale_rewards to none")


def group_advantages(rewards: Tensor, groups: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    """Advantages relative to the mean reward of the group (Shao et al., 2024, arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: [N], rewards of a whole step.
        groups: [N] int64, numbered from 0 without a gap.
        scale: group or batch divide by the unbiased standard deviation of the group or of the step, plus 1e-4; none
            does not (Liu et al., 2025, arXiv:2503.20783).

    Returns:
        Advantages [N]; standard deviations [N], of the step with batch, else of the group, 0 for a single sample.
    """
    counts = torch.zeros(int(groups.max()) + 1, dtype=rewards.dtype).index_add_(0, groups, torch.ones_like(rewards))
    means = torch.zeros_like(counts).index_add_(0, groups, rewards) / counts
    advantages = rewards - means[groups]
    if scale == "batch":
        deviations = (rewards.std() if len(rewards) > 1 else rewards.new_zeros(())).expand_as(rewards)
    else:
        squares = torch.zeros_like(counts).index_add_(0, groups, advantages.square())
        deviations = (squares / (counts - 1).clamp(min=1)).sqrt()[groups]
    return (advantages if scale == "none" else advantages / (deviations + STD_EPSILON)), deviations
