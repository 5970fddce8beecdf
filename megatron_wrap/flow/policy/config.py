"""The keys of `gpt_grpo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_wrap.config.schema.keys import key
from megatron_wrap.flow.shared.text import TextFlow

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
SEQUENCE_LOSSES = ("grpo", "sapo")
"""Losses that are means over sequences of means over tokens."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(TextFlow.Config):
    """Keys of `megatron_wrap.flow`."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = "dapo"
    """grpo: clipped ratios, a mean over sequences of means over tokens; dapo, bnpo: a mean over the tokens of the step;
    dr_grpo: the sum over tokens divided by sequences * max_completion_length; cispo: clipped weights, over tokens;
    sapo: a soft gate, as grpo."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratios of single tokens, or one ratio of the whole response: the geometric mean over its tokens (GSPO,
    arXiv:2507.18071)."""
    epsilon: float = key(0.2, at_least=0, at_most=1)
    """A ratio is clipped below 1 - epsilon."""
    epsilon_high: float | None = key(None, at_least=0)
    """A ratio is clipped above 1 + epsilon_high; null: epsilon. For cispo see cispo_range."""
    delta: float | None = None
    """Upper limit of the ratio that is not clipped, for negative advantages; above 1 + epsilon_high. null: none."""
    clip_ratio_c: float | None = key(None, above=1)
    """Dual clip: where the advantage A is negative, the loss is at most -clip_ratio_c * A. null: none."""
    cispo_range: Literal["cap", "interval"] = "cap"
    """Range of cispo's weights: cap, up to epsilon_high itself, which must be set (trl); interval, from 1 - epsilon to
    1 + epsilon_high (verl, NeMo-RL)."""
    sapo_temperature_pos: float = key(1.0, above=0)
    """Temperature of sapo's gate for positive advantages."""
    sapo_temperature_neg: float = key(1.05, above=0)
    """Temperature of sapo's gate for other advantages."""
    beta: float = key(0.0, at_least=0)
    """Factor of the KL divergence from the reference model. Above 0 it needs models.reference, or
    reference_log_probs in the samples."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL divergence from the sampled tokens (docs/policy.md)."""
    kl_clamp: bool = False
    """Clamp the log-ratio of k3 to [-20, 20] and its value to [-10, 10], as verl and NeMo-RL; trl does not."""
    use_bias_correction_kl: bool = True
    """Multiply the KL divergence by the ratio, so that its gradient is unbiased (arXiv:2512.02556)."""
    entropy_coefficient: float = 0.0
    """Factor of the mean entropy over tokens in nats, which is subtracted from the loss."""
    top_entropy_quantile: float = key(1.0, above=0, at_most=1)
    """Share of the step's tokens, those of highest entropy, that have a policy loss (arXiv:2506.01939). Below 1 it
    takes one more forward pass."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Advantages from rewards: the difference from the group's mean, divided by the standard deviation of the group or
    of the step, or not divided."""
    mask_truncated_completions: bool = False
    """Truncated responses have no loss; they stay part of the number of sequences."""
    max_completion_length: int | None = key(None, above=0)
    """Tokens of the longest response, for dr_grpo's denominator, which needs it."""
    rollout_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Weight of the policy loss by the probability at the start of the update divided by the rollout's, of a token or
    of the response: truncated to the range below, or 0 outside of it."""
    rollout_correction_threshold: float = key(3.0, above=0)
    """Upper end of the range of the rollout's weights."""
    rollout_correction_minimum: float = key(0.0, at_least=0)
    """Lower end of the range of the rollout's weights."""
    rollout_correction_of_kl: bool = False
    """Apply the rollout's weight to the KL divergence as well (ms-swift); trl and verl weight the policy loss alone."""

    def __post_init__(self) -> None:
        upper = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if self.delta is not None and self.delta <= upper:
            raise ValueError(f"delta is {self.delta}; it must be larger than {upper}, the end of the clipped range")
        low, high = self.rollout_correction_minimum, self.rollout_correction_threshold
        if low >= high:
            raise ValueError(f"rollout_correction_minimum is {low}; it must be below the threshold, {high}")
        if self.loss_on == "all":
            raise ValueError("loss_on is all; only tokens that the policy generated are trained, assistant")
        if self.loss_type == "cispo" and self.cispo_range == "cap" and self.epsilon_high is None:
            raise ValueError("cispo with cispo_range cap needs epsilon_high, the largest weight itself, such as 5.0")
        for name in ("delta", "clip_ratio_c"):
            if getattr(self, name) is not None and self.loss_type not in CLIPPED_LOSSES:
                raise ValueError(f"{name} is set, but loss_type {self.loss_type} does not clip; set {name} to null")
        if self.cispo_range != "cap" and self.loss_type != "cispo":
            raise ValueError(f"cispo_range is {self.cispo_range}, but loss_type is {self.loss_type}; set it to cap")
        if (self.loss_type == "dr_grpo") != (self.max_completion_length is not None):
            raise ValueError(
                f"max_completion_length is {self.max_completion_length} and loss_type {self.loss_type}; set it for "
                "dr_grpo, to the largest number of tokens that a response may have, and for no other loss"
            )
        if self.kl_clamp and self.kl_estimator != "k3":
            raise ValueError(
                f"kl_clamp is defined for k3, and kl_estimator is {self.kl_estimator}; set kl_clamp to false"
            )
        if self.rollout_correction_of_kl and (self.rollout_correction == "none" or not self.beta):
            raise ValueError("rollout_correction_of_kl needs a rollout_correction and beta above 0")

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper end of a clipped ratio; cispo's cap has no lower end, 0."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.loss_type == "cispo" and self.cispo_range == "cap":
            return 0.0, high
        return 1 - self.epsilon, 1 + high
