"""Group relative policy optimization (GRPO) and its family, of a GPT model on rollouts that the caller provides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.data.chat.encode import ChatTokens
from megatron_wrap.errors import DataError
from megatron_wrap.flow.contract.base import FlowContext, LossOutput
from megatron_wrap.flow.policy.config import CLIPPED_LOSSES, SEQUENCE_LOSSES, GRPOConfig
from megatron_wrap.flow.policy.losses import (
    check_groups,
    cispo,
    clipped,
    group_advantages,
    highest_values,
    kl_estimates,
    number_groups,
    rollout_weights,
    sapo,
)
from megatron_wrap.flow.policy.metrics import (
    PolicyTerms,
    clip_metrics,
    completion_metrics,
    reward_metrics,
    rollout_metrics,
)
from megatron_wrap.flow.policy.rollouts import (
    ADVANTAGE,
    GROUP,
    OLD,
    PER_TOKEN,
    REFERENCE,
    REWARD,
    ROLLOUT,
    Rollout,
    RolloutFacts,
    common_keys,
    encode_rollout,
)
from megatron_wrap.flow.shared.text import ENCODED, TextFlow
from megatron_wrap.metrics.metric import Metric, Total
from megatron_wrap.ops.log_probs import entropy, log_probs_and_entropy, token_log_probs

_POLICY, _ENTROPY = "policy", "entropy"
"""Loss terms of a run with an entropy bonus."""
_ROLLOUT = "rollout"
"""Key of a prepared sample's `Rollout`."""


class MegatronWrapGPTModelGRPOFlow(TextFlow):
    """Policy optimization on responses that a rollout engine generated (GRPO: Shao et al., 2024, arXiv:2402.03300). The
    loss of a token is that of `loss_type` (`policy/losses.py`) with its advantage, plus `beta` times an estimate of the
    KL divergence from a reference model; docs/policy.md has the formulas and conventions.

    A sample is a prompt with one response (see `megatron_wrap.flow.policy.rollouts.encode_rollout`). Advantages come
    from the sample, or from the rewards of all responses of its group in the step, however the batch is split; so all
    responses of a group must be in one batch. The ratio's denominator is `old_log_probs` of the sample; without them it
    is the policy itself, and the ratio is 1.
    """

    Config = GRPOConfig
    supports_packing = True
    console_metrics = ("reward", "kl", "entropy", "completions/mean_length", "truncated_samples")

    def __init__(self, flow_config: Any, context: FlowContext) -> None:
        super().__init__(flow_config, context)
        self.step_values_from = "outputs" if flow_config.top_entropy_quantile < 1 else "inputs"

    def prepare_sample(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The sample with its `ChatTokens` as `encoded`, and its `Rollout`.

        Raises:
            DataError: a key is missing or its value is wrong, or it is longer than `truncation: refuse` allows.
        """
        rollout = self._rollout(sample)
        return super().prepare_sample({**sample, ENCODED: rollout.tokens, _ROLLOUT: rollout})

    def _encode(self, sample: Mapping[str, Any]) -> ChatTokens:
        return self._rollout(sample).tokens

    def _rollout(self, sample: Mapping[str, Any]) -> Rollout:
        if _ROLLOUT in sample:
            rollout: Rollout = sample[_ROLLOUT]
            return rollout
        config = self.flow_config
        return encode_rollout(
            self.context.tokenizer, sample, config.loss_on, self.seq_length + 1, config.truncation == "left"
        )

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Up to B samples, prepared or not, as [B, S].

        Loss inputs, in addition to those of `collate_tokens`: [B, S], the values per token that the samples contain, 0
        elsewhere, and `rows` and `columns`, the index of the token's sequence and its position in it; [B],
        `response_lengths` (tokens with a loss) and `truncated_responses`.
        """
        rollouts = [self._rollout(sample) for sample in itertools.islice(iterator, self.micro_batch_size)]
        model_forward_inputs, loss_inputs = self.collate_tokens([rollout.tokens for rollout in rollouts])
        mask = loss_inputs["loss_mask"]
        without_end = loss_inputs["truncated"] if self.flow_config.truncation == "right" else torch.zeros(len(rollouts))
        flags = torch.tensor([float(rollout.truncated) for rollout in rollouts])
        loss_inputs["truncated_responses"] = torch.maximum(flags, without_end)
        loss_inputs["response_lengths"] = mask.sum(dim=1)
        if self.flow_config.mask_truncated_completions:
            loss_inputs["loss_mask"] = mask * (1 - loss_inputs["truncated_responses"])[:, None]
        for name in PER_TOKEN:
            if any(name in rollout.per_token for rollout in rollouts):
                loss_inputs[name] = self._per_token(name, rollouts, mask)
        loss_inputs["rows"] = torch.arange(len(rollouts))[:, None].expand(mask.shape)
        loss_inputs["columns"] = torch.arange(mask.shape[1]).expand(mask.shape)
        return model_forward_inputs, loss_inputs

    def _per_token(self, name: str, rollouts: list[Rollout], mask: Tensor) -> Tensor:
        """Values of the labels, truncated like the tokens, fp32 [B, S]."""
        values, kept = torch.zeros_like(mask), self.seq_length + 1
        for row, rollout in enumerate(rollouts):
            of_tokens = rollout.per_token.get(name, [0.0] * len(rollout.tokens))
            of_tokens = of_tokens[-kept:] if self.flow_config.truncation == "left" else of_tokens[:kept]
            values[row, : len(of_tokens) - 1] = torch.tensor(of_tokens[1:])
        return torch.where(mask != 0, values, 0.0)

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields, the values per token, `rows`, `columns`, and the output `log_probs`."""
        fields = (*PER_TOKEN, "rows", "columns", "log_probs")
        return {**super().get_fields_and_seqdims(), **dict.fromkeys(fields, 1)}

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float | dict[str, float]:
        """Sequences (grpo, sapo), sequences * `max_completion_length` (dr_grpo), or tokens with a loss; with an entropy
        bonus also the tokens, as a term of its own."""
        mask, config = loss_inputs["loss_mask"], self.flow_config
        weight = tokens = float(mask.sum())
        sequences = float(len(loss_inputs["response_lengths"]))
        if config.loss_type in SEQUENCE_LOSSES:
            weight = sequences
        elif config.loss_type == "dr_grpo":
            weight = sequences * config.max_completion_length
        return {_POLICY: weight, _ENTROPY: tokens} if config.entropy_coefficient else weight

    def has_loss(self, loss_inputs: Mapping[str, Tensor]) -> bool:
        """Whether a token has a loss; with `mask_truncated_completions` all responses may have none."""
        return bool(loss_inputs["loss_mask"].any())

    def get_loss_coefficients(self) -> dict[str, float]:
        """Minus `entropy_coefficient` for the entropy's term."""
        return {_ENTROPY: -self.flow_config.entropy_coefficient} if self.flow_config.entropy_coefficient else {}

    def calculate_step_values(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor | None
    ) -> dict[str, Tensor]:
        """With `top_entropy_quantile`: `entropies` [B, seq_length], of each token with a loss by its position in the
        sequence, -1 elsewhere."""
        if model_forward_output is None:
            return {}
        return {"entropies": self._by_position(entropy(model_forward_output), loss_inputs)}

    def get_sample_facts(self, sample: Mapping[str, Any]) -> RolloutFacts:
        """Keys, reward and group of the sample."""
        return self._rollout(sample).facts

    def reduce_sample_facts(self, facts: Sequence[RolloutFacts]) -> dict[str, Tensor]:
        """`rewards` [N] fp64 and `groups` [N] int64, if the samples have rewards with groups.

        Raises:
            DataError: some samples have a key that others lack, or a group has one response.
        """
        keys = common_keys(facts)
        if not keys >= {REWARD, GROUP}:
            return {}
        groups = number_groups([sample.group for sample in facts])
        if ADVANTAGE not in keys:
            check_groups(groups, self.flow_config.scale_rewards)
        rewards = torch.tensor([sample.reward for sample in facts], dtype=torch.float64)
        return {"rewards": rewards, "groups": torch.tensor(groups)}

    def reduce_step_values(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """`advantages` [N] and `reward`, `reward_std`, `zero_std` of the step, if the samples have rewards with groups;
        with `top_entropy_quantile` `high_entropy` [N, seq_length], 1 on tokens of high entropy, and their share
        `entropy_share`."""
        results: dict[str, Tensor] = {}
        if "rewards" in values:
            rewards, groups = values["rewards"].cpu(), values["groups"].cpu()
            advantages, deviations = group_advantages(rewards, groups, self.flow_config.scale_rewards)
            std = rewards.std() if len(rewards) > 1 else torch.zeros(())
            zero = torch.isclose(deviations, torch.zeros_like(deviations)).double().mean()
            statistics = {"advantages": advantages, "reward": rewards.mean(), "reward_std": std, "zero_std": zero}
            results = {name: value.float().to(values["rewards"].device) for name, value in statistics.items()}
        if "entropies" in values:
            entropies = values["entropies"]
            high = highest_values(entropies, entropies >= 0, self.flow_config.top_entropy_quantile)
            results["high_entropy"] = high.float()
            results["entropy_share"] = high.sum() / (entropies >= 0).sum().clamp(min=1)
        return results

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the sum; docs/policy.md lists the metrics.

        Raises:
            DataError: reference or rollout log-probabilities are missing.
        """
        config, mask = self.flow_config, loss_inputs["loss_mask"]
        log_probs, entropies = self._log_probs_and_entropies(loss_inputs, model_forward_output)
        terms = self._terms(loss_inputs, log_probs)
        per_token = self._policy_loss(terms)
        kept = self._high_entropy(loss_inputs) if config.top_entropy_quantile < 1 else torch.ones_like(mask)
        per_token = per_token * kept
        metrics: dict[str, Metric] = {}
        weights = self._rollout_weights(loss_inputs, terms)
        if weights is not None:
            per_token = per_token * weights
        if config.beta:
            kl = self._kl(loss_inputs, terms)
            metrics["kl"] = (self.token_mean(kl.detach(), mask), mask.sum())
            per_token = per_token + config.beta * (
                kl * weights if weights is not None and config.rollout_correction_of_kl else kl
            )
        metrics["entropy"] = (self.token_mean(entropies.detach(), mask), mask.sum())
        metrics |= clip_metrics(self, terms, loss_inputs) | completion_metrics(self, loss_inputs)
        metrics |= reward_metrics(self, loss_inputs) | rollout_metrics(self, terms, loss_inputs, weights)
        metrics["truncated_samples"] = Total(self.sequence_mean(loss_inputs["truncated"]))
        if config.loss_type in SEQUENCE_LOSSES:
            means = self.sum_per_sequence(per_token * mask, loss_inputs) / terms.lengths.clamp(min=1)
            policy = self.sequence_mean(means)
        else:
            policy = self.token_mean(per_token, mask)
        if not config.entropy_coefficient:
            return LossOutput(policy, metrics)
        bonus = self.token_mean(entropies * kept, mask)
        if config.top_entropy_quantile < 1:  # the mean over the tokens that are kept; the weight has all of them
            bonus = bonus / loss_inputs["step_entropy_share"].clamp(min=torch.finfo(torch.float32).tiny)
        return LossOutput({_POLICY: policy, _ENTROPY: bonus}, metrics)

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`log_probs` [B, S/cp]: log-probability of each token with a loss given those before it, 0 elsewhere. A sample
        may contain them unchanged as `old_log_probs` or `reference_log_probs`."""
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        return {"log_probs": torch.where(loss_inputs["loss_mask"] != 0, log_probs, 0.0)}

    def _log_probs_and_entropies(self, loss_inputs: Mapping[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the labels, and entropies in nats, [B, S/cp] each, 0 where there is no loss. The
        entropies have a gradient if the loss has an entropy term."""
        labels, counted = loss_inputs["labels"], loss_inputs["loss_mask"] != 0
        if self.flow_config.entropy_coefficient:
            log_probs, entropies = token_log_probs(logits, labels), entropy(logits)
        else:
            log_probs, entropies = log_probs_and_entropy(logits, labels)
        return torch.where(counted, log_probs, 0.0), torch.where(counted, entropies, 0.0)

    def _terms(self, loss_inputs: Mapping[str, Tensor], log_probs: Tensor) -> PolicyTerms:
        mask = loss_inputs["loss_mask"]
        old = torch.where(mask != 0, loss_inputs.get(OLD, log_probs.detach()), 0.0)
        log_ratios, lengths = log_probs - old, self.sum_per_sequence(mask, loss_inputs)
        per_sequence = None
        if self.flow_config.importance_sampling_level == "sequence":
            per_sequence = self.sum_per_sequence(log_ratios * mask, loss_inputs) / lengths.clamp(min=1)
            log_ratios = self._spread(per_sequence, loss_inputs)
        advantages = loss_inputs.get(ADVANTAGE)
        if advantages is None:
            advantages = self._spread(loss_inputs["step_advantages"][loss_inputs["step_indices"]], loss_inputs)
        return PolicyTerms(log_probs, old, torch.exp(log_ratios), advantages, lengths, per_sequence is not None)

    def _policy_loss(self, terms: PolicyTerms) -> Tensor:
        """Policy loss of each token, [B, S/cp]."""
        config, ratios, advantages = self.flow_config, terms.ratios, terms.advantages
        low, high = config.clip_range
        if config.loss_type in CLIPPED_LOSSES:
            return clipped(ratios, advantages, low, high, config.delta, config.clip_ratio_c)
        if config.loss_type == "cispo":
            return cispo(ratios, advantages, terms.log_probs, low, high)
        return sapo(ratios, advantages, config.sapo_temperature_pos, config.sapo_temperature_neg)

    def _kl(self, loss_inputs: Mapping[str, Tensor], terms: PolicyTerms) -> Tensor:
        config = self.flow_config
        if REFERENCE not in loss_inputs:
            raise DataError(
                f"beta is {config.beta} and there are no log-probabilities of a reference model: set "
                f"megatron_wrap.models.reference: copy, add {REFERENCE} to each sample, or set beta to 0"
            )
        reference = torch.where(loss_inputs["loss_mask"] != 0, loss_inputs[REFERENCE], 0.0)
        kl = kl_estimates(terms.log_probs, reference, config.kl_estimator, config.kl_clamp)
        return kl * terms.ratios if config.use_bias_correction_kl else kl

    def _rollout_weights(self, loss_inputs: Mapping[str, Tensor], terms: PolicyTerms) -> Tensor | None:
        """Factor of each token's policy loss from `rollout_correction`, [B, S/cp] without a gradient; None without a
        correction."""
        config, mask = self.flow_config, loss_inputs["loss_mask"]
        if config.rollout_correction == "none":
            return None
        if ROLLOUT not in loss_inputs:
            raise DataError(
                f"rollout_correction is {config.rollout_correction} and the samples have no {ROLLOUT}; add them, or "
                "set it to none"
            )
        differences = torch.where(mask != 0, terms.old - loss_inputs[ROLLOUT], 0.0).nan_to_num(nan=0.0)
        if config.rollout_correction.startswith("sequence"):
            differences = self._spread(self.sum_per_sequence(differences, loss_inputs), loss_inputs)
        limits = config.rollout_correction_minimum, config.rollout_correction_threshold
        return rollout_weights(differences, config.rollout_correction, *limits)

    def _spread(self, per_sequence: Tensor, loss_inputs: Mapping[str, Tensor]) -> Tensor:
        """Value of each token's sequence: [B] -> [B, S/cp] or [1, S/cp]."""
        return per_sequence[loss_inputs["rows"]]

    def _by_position(self, entropies: Tensor, loss_inputs: Mapping[str, Tensor]) -> Tensor:
        """Entropies by position in the sequence: [B, S/cp] or [1, S/cp] -> [B, seq_length] on every context-parallel
        rank; -1 where there is no loss."""
        counted, rows = loss_inputs["loss_mask"] != 0, loss_inputs["rows"]
        table = entropies.new_zeros(2, len(loss_inputs["response_lengths"]), self.seq_length)
        positions = (rows[counted], loss_inputs["columns"][counted])
        table[0][positions] = entropies[counted].to(table.dtype)
        table[1][positions] = 1.0
        values, has_loss = self.sum_on_cp_group(table)
        return torch.where(has_loss != 0, values, -1.0)

    def _high_entropy(self, loss_inputs: Mapping[str, Tensor]) -> Tensor:
        """Mask of the tokens of high entropy, [B, S/cp] or [1, S/cp]."""
        of_samples = loss_inputs["step_high_entropy"][loss_inputs["step_indices"]]
        return of_samples[loss_inputs["rows"], loss_inputs["columns"]]
