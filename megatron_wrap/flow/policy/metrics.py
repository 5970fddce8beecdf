"""Metrics of `gpt_grpo`, with the names and definitions of trl 1.16.0, over the whole step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_wrap.flow.contract.base import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.policy.config import CLIPPED_LOSSES
from megatron_wrap.flow.policy.rollouts import ROLLOUT
from megatron_wrap.metrics.metric import Maximum, Metric, Minimum


@dataclass(frozen=True)
class PolicyTerms:
    """Values of a micro-batch that the losses use: [B, S/cp], or [1, S/cp] if packed, unless noted."""

    log_probs: Tensor
    """Log-probabilities of the policy; 0 where there is no loss."""
    old: Tensor
    """Log-probabilities of the policy that the update started from; 0 where there is no loss."""
    ratios: Tensor
    advantages: Tensor
    lengths: Tensor
    """Number of tokens with a loss of each sequence, [B]."""
    by_sequence: bool
    """Whether the ratios of a sequence's tokens are equal."""


def clip_metrics(
    flow: MegatronWrapTrainingFlowBase, terms: PolicyTerms, loss_inputs: Mapping[str, Tensor]
) -> dict[str, Metric]:
    """Shares of clipped tokens, or of clipped sequences if their ratios are equal: `clip_ratio/low_mean` (below the
    range with a negative advantage), `high_mean` (above it with a positive one), `region_mean` (both), and the smallest
    and the largest share of a sequence; for cispo `cispo_clip_ratio`."""
    config, mask = flow.flow_config, loss_inputs["loss_mask"]
    low, high = config.clip_range
    ratios = terms.ratios.detach()
    below = ((ratios < low) & (terms.advantages < 0)).float()
    above = ((ratios > high) & (terms.advantages > 0)).float()

    def of_sequences(clipped: Tensor) -> Tensor:
        return flow.sum_per_sequence(clipped * mask, loss_inputs) / terms.lengths

    def share(clipped: Tensor) -> Metric:
        if not terms.by_sequence:
            return flow.token_mean(clipped, mask), mask.sum()
        return _mean(flow, of_sequences(clipped), terms.lengths > 0)

    if config.loss_type == "cispo":
        return {"cispo_clip_ratio": share(above)}
    if config.loss_type not in CLIPPED_LOSSES:
        return {}
    counted = terms.lengths > 0
    return {
        "clip_ratio/low_mean": share(below),
        "clip_ratio/high_mean": share(above),
        "clip_ratio/region_mean": share(below + above),
        "clip_ratio/low_min": _smallest(of_sequences(below), counted),
        "clip_ratio/high_max": _largest(of_sequences(above), counted),
    }


def completion_metrics(flow: MegatronWrapTrainingFlowBase, loss_inputs: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Lengths of responses in tokens that the policy generated, also of those that `mask_truncated_completions` masks;
    of all responses, and of those that are not truncated."""
    lengths, truncated = loss_inputs["response_lengths"], loss_inputs["truncated_responses"]
    everything, ended = torch.ones_like(truncated, dtype=torch.bool), truncated == 0
    return {
        "completions/mean_length": _mean(flow, lengths, everything),
        "completions/min_length": _smallest(lengths, everything),
        "completions/max_length": _largest(lengths, everything),
        "completions/clipped_ratio": _mean(flow, truncated, everything),
        "completions/mean_terminated_length": _mean(flow, lengths, ended),
        "completions/min_terminated_length": _smallest(lengths, ended),
        "completions/max_terminated_length": _largest(lengths, ended),
    }


def reward_metrics(flow: MegatronWrapTrainingFlowBase, loss_inputs: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Mean and unbiased standard deviation of the step's rewards, and the share of its samples whose rewards have
    standard deviation 0 in their group, or in the step with `scale_rewards: batch`. Nothing without rewards and
    groups."""
    if "step_reward" not in loss_inputs:
        return {}
    ones = torch.ones_like(loss_inputs["response_lengths"])
    names = {"reward": "step_reward", "reward_std": "step_reward_std", "frac_reward_zero_std": "step_zero_std"}
    return {name: _mean(flow, loss_inputs[value] * ones, ones != 0) for name, value in names.items()}


def rollout_metrics(
    flow: MegatronWrapTrainingFlowBase,
    terms: PolicyTerms,
    loss_inputs: Mapping[str, Tensor],
    weights: Tensor | None,
) -> dict[str, Metric]:
    """Absolute difference of the log-probabilities at the start of the update and of the rollout, where the latter are
    known; with a rollout correction also the weights (of sequences, if they have one weight each)."""
    if ROLLOUT not in loss_inputs:
        return {}
    mask = loss_inputs["loss_mask"] != 0
    known = mask & ~loss_inputs[ROLLOUT].isnan()
    differences = (terms.old - loss_inputs[ROLLOUT]).abs()
    name = "sampling/sampling_logp_difference"
    metrics: dict[str, Metric] = {
        f"{name}/mean": (torch.where(known, differences, 0.0).sum(), known.sum()),
        f"{name}/max": _largest(differences, known),
    }
    if weights is None:
        return metrics
    name, mean = "sampling/importance_sampling_ratio", (torch.where(mask, weights, 0.0).sum(), mask.sum())
    metrics |= {f"{name}/min": _smallest(weights, mask), f"{name}/mean": mean, f"{name}/max": _largest(weights, mask)}
    if flow.flow_config.rollout_correction.startswith("sequence"):
        counted = terms.lengths > 0
        by_sequence = flow.sum_per_sequence(weights * mask, loss_inputs) / terms.lengths
        metrics[f"{name}/mean"] = _mean(flow, by_sequence, counted)
    return metrics


def _mean(flow: MegatronWrapTrainingFlowBase, values: Tensor, counted: Tensor) -> Metric:
    """The mean of values [B], equal on all context-parallel ranks, over those that are counted."""
    return flow.sequence_mean(torch.where(counted, values, 0.0)), flow.sequence_mean(counted.float())


def _smallest(values: Tensor, counted: Tensor) -> Metric:
    return Minimum(torch.where(counted, values, math.inf).min())


def _largest(values: Tensor, counted: Tensor) -> Metric:
    return Maximum(torch.where(counted, values, -math.inf).max())
