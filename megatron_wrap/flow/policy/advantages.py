"""Advantages of responses relative to their group: the groups of a step, and the formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_wrap.errors import DataError

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
