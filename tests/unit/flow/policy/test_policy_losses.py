"""The losses of policy optimization as formulas in float64, samples that are refused, and options. No process group."""

import math
import statistics
from typing import Any

import pytest
import torch

from megatron_wrap.data.chat.encode import ChatTokens
from megatron_wrap.errors import DataError
from megatron_wrap.flow import FlowContext, grpo
from megatron_wrap.flow.grpo import MegatronWrapGPTModelGRPOFlow
from megatron_wrap.flow.policy import losses
from megatron_wrap.flow.policy.losses import group_advantages
from megatron_wrap.flow.policy.rollouts import RolloutFacts, encode_rollout

Config = MegatronWrapGPTModelGRPOFlow.Config
LOG_PROBS, ADVANTAGES = ((-0.5, -2.0, -1.0), (-0.1, -3.0)), (1.5, -0.75)
OLD, ROLLOUT, REFERENCE = (
    ((-1.0, -1.0, -1.1), (-1.5, -0.2)),
    ((-1.4, -0.9, -1.1), (-1.0, -0.9)),
    ((-0.7, -25.0, -1.2), (-0.3, -2.0)),
)
ENTROPY = 0.3


def flow(**options: Any) -> MegatronWrapGPTModelGRPOFlow:
    context = FlowContext(2, 8, 20, 1, lambda part: part, lambda value: value, None)
    return MegatronWrapGPTModelGRPOFlow(Config(flow_key="gpt_grpo", **options), context)


def samples() -> list[dict[str, Any]]:
    values = zip(LOG_PROBS, OLD, ROLLOUT, REFERENCE, ADVANTAGES, strict=True)
    return [
        {
            "prompt_ids": [3, 4],
            "response_ids": list(range(5, 5 + len(current))),
            "old_log_probs": list(old),
            "rollout_log_probs": list(rollout),
            "reference_log_probs": list(reference),
            "advantage": advantage,
        }
        for current, old, rollout, reference, advantage in values
    ]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def k3(d: float) -> float:
    return math.exp(d) - d - 1


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "dual clip": (
        {"clip_ratio_c": 1.2},
        lambda r, a, p, d, w: (
            min(-min(r * a, clip(r, 0.8, 1.2) * a), -1.2 * a) if a < 0 else -min(r * a, clip(r, 0.8, 1.2) * a)
        ),
    ),
    "cispo in an interval": (
        {"loss_type": "cispo", "cispo_range": "interval", "epsilon": 0.1, "epsilon_high": 0.3},
        lambda r, a, p, d, w: -clip(r, 0.9, 1.3) * a * p,
    ),
    "k1": (
        {"beta": 0.5, "kl_estimator": "k1", "use_bias_correction_kl": False},
        lambda r, a, p, d, w: -min(r * a, clip(r, 0.8, 1.2) * a) + 0.5 * -d,
    ),
    "k2": (
        {"beta": 0.5, "kl_estimator": "k2"},
        lambda r, a, p, d, w: -min(r * a, clip(r, 0.8, 1.2) * a) + 0.25 * d * d * r,
    ),
    "k3 clamped": (
        {"beta": 0.5, "kl_clamp": True, "use_bias_correction_kl": False},
        lambda r, a, p, d, w: -min(r * a, clip(r, 0.8, 1.2) * a) + 0.5 * clip(k3(clip(d, -20, 20)), -10, 10),
    ),
    "correction of the policy loss": (
        {"beta": 0.5, "rollout_correction": "token_truncate", "rollout_correction_threshold": 1.1},
        lambda r, a, p, d, w: -min(r * a, clip(r, 0.8, 1.2) * a) * min(w, 1.1) + 0.5 * k3(d) * r,
    ),
    "correction of both": (
        {"beta": 0.5, "rollout_correction": "token_mask", "rollout_correction_of_kl": True},
        lambda r, a, p, d, w: (-min(r * a, clip(r, 0.8, 1.2) * a) + 0.5 * k3(d) * r) * (w if w <= 3 else 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_its_formula(monkeypatch, name):
    """The options that trl does not have, and where they are in the loss: the mean over five tokens in float64."""
    monkeypatch.setattr(grpo, "log_probs_and_entropy", lambda logits, ids: (logits, torch.full_like(logits, ENTROPY)))
    options, formula = CASES[name]
    made = flow(**options)
    _, loss_inputs = made.collate_data_micro_batch(iter([made.prepare_sample(sample) for sample in samples()]))
    mask = loss_inputs["loss_mask"] != 0
    loss_inputs |= {key: value.double() for key, value in loss_inputs.items() if value.is_floating_point()}
    log_probs = torch.full(mask.shape, -9.0, dtype=torch.float64)
    log_probs[mask] = torch.tensor([value for of_sequence in LOG_PROBS for value in of_sequence], dtype=torch.float64)
    output = made.calculate_loss(loss_inputs, log_probs)
    expected = [
        formula(math.exp(p - old), advantage, p, reference - p, math.exp(old - rollout))
        for *rows, advantage in zip(LOG_PROBS, OLD, ROLLOUT, REFERENCE, ADVANTAGES, strict=True)
        for p, old, rollout, reference in zip(*rows, strict=True)
    ]
    assert made.get_loss_weight(loss_inputs) == len(expected) == 5
    assert float(output.loss_sum) == pytest.approx(sum(expected), rel=1e-6)
    total, weight = output.metrics["entropy"]
    assert float(total) / float(weight) == pytest.approx(ENTROPY)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_relative_to_the_group(scale):
    groups = {0: [1.0, 2.0, 4.0], 1: [0.5, 0.5], 2: [3.0]}
    order = [0, 1, 0, 2, 1, 0]
    rewards = [groups[group][sum(other == group for other in order[:index])] for index, group in enumerate(order)]
    actual, deviations = group_advantages(torch.tensor(rewards).double(), torch.tensor(order), scale)
    for reward, group, advantage, deviation in zip(rewards, order, actual.tolist(), deviations.tolist(), strict=True):
        rewards_of_group = groups[group]
        std = statistics.stdev(rewards_of_group) if len(rewards_of_group) > 1 else 0.0
        std = statistics.stdev(rewards) if scale == "batch" else std
        assert deviation == pytest.approx(std)
        divisor = 1.0 if scale == "none" else std + 1e-4
        assert advantage == pytest.approx((reward - statistics.mean(rewards_of_group)) / divisor)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_the_highest_values_are_those_above_the_quantile(share):
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).abs()
    counted = values > 0.3
    expected = (values >= torch.quantile(values[counted], 1 - share)) & counted
    assert torch.equal(losses.highest_values(values, counted, share), expected)
    assert not losses.highest_values(values, torch.zeros_like(counted), share).any()


def test_values_are_aligned_with_the_responses_tokens():
    """Those of the response, those of `wrap.forward`, and of a truncated sequence; 0 where a token has no loss."""
    sample = {"prompt_ids": [3, 4, 5], "response_ids": [6, 7, 8], "response_mask": [1, 0, 1], "advantage": 2}
    whole = encode_rollout(None, {**sample, "old_log_probs": [-1, None, -3]}, "assistant", 9)
    assert whole.tokens == ChatTokens([3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 0, 1])
    assert whole.per_token == {"old_log_probs": [0, 0, 0, -1, 0, -3], "advantage": [0, 0, 0, 2, 0, 2]}
    forward = encode_rollout(None, {**sample, "old_log_probs": torch.tensor([0, 0, -1, 0, -3.0])}, "assistant", 9)
    assert forward.per_token == whole.per_token
    log_probs = {"rollout_log_probs": [0, 0, -1, 0], "old_log_probs": [-1, 0, -3]}
    right = encode_rollout(None, {**sample, **log_probs}, "assistant", 5)
    assert right.per_token["rollout_log_probs"] == [0, 0, 0, -1, 0, 0]
    left = encode_rollout(None, {**sample, "old_log_probs": [0, -1, 0, -3]}, "assistant", 5, cut_left=True)
    assert left.per_token["old_log_probs"] == [0, 0, 0, -1, 0, -3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_log_probs": [-1.0] * 9}, '"old_log_probs" has 9 values for a response of 3 tokens'),
        ({"old_log_probs": [-1.0, math.nan, -1.0]}, '"old_log_probs" is nan for token 1'),
        ({"reference_log_probs": 3.0}, '"reference_log_probs" is 3.0'),
        ({"advantage": [1.0, math.inf, 0.0]}, '"advantage" is inf for token 1'),
        ({"advantage": None, "reward": math.nan}, '"reward" is nan'),
        ({"advantage": None, "reward": 1.0}, 'no "group"'),
        ({"advantage": None}, 'neither "reward" nor "advantage"'),
        ({"group": 1.5}, '"group" is 1.5'),
        ({"response_mask": [1, 0]}, '"response_mask" has 2 values for a response of 3 tokens'),
        ({"truncated": "yes"}, "\"truncated\" is 'yes'"),
        ({"prompt_ids": []}, "the prompt of a sample has no tokens"),
        ({"response_ids": []}, "the response of a sample has no tokens"),
        ({"weight": 2.0}, '"weight" is 2.0'),
    ],
)
def test_a_wrong_sample_is_refused(change, message):
    sample = {"prompt_ids": [3, 4], "response_ids": [5, 6, 7], "advantage": 1.0, **change}
    with pytest.raises(DataError, match=message):
        flow().prepare_sample(sample)


def test_facts_of_a_step_are_rewards_and_numbered_groups():
    """A name and an integer are two groups, whatever they look like; "reward" is one of all samples or of none."""
    prepared = [
        flow().prepare_sample({"prompt_ids": [3], "response_ids": [5], "reward": reward, "group": group})
        for reward, group in ((0.5, 1), (1.0, "1"), (0.25, 1), (2.0, "1"))
    ]
    facts = [flow().get_sample_facts(sample) for sample in prepared]
    assert facts[1] == RolloutFacts(frozenset({"reward", "group"}), 1.0, "1")
    reduced = flow().reduce_sample_facts(facts)
    assert reduced["rewards"].tolist() == [0.5, 1.0, 0.25, 2.0]
    assert reduced["groups"].tolist() == [0, 1, 0, 1]
    values = flow(scale_rewards="none").reduce_step_values(reduced)
    assert values["advantages"].tolist() == [0.125, -0.5, -0.125, 0.5]
    with pytest.raises(DataError, match="sample 2 of a batch of 3 is the only one of its group"):
        flow().reduce_sample_facts([facts[0], facts[2], facts[1]])
    with_advantage = flow().get_sample_facts({"prompt_ids": [3], "response_ids": [5], "advantage": 1.0})
    assert flow().reduce_sample_facts([with_advantage]) == {}
    with pytest.raises(DataError, match='sample 1 of a batch of 2 has "advantage" and sample 0 has none'):
        flow().reduce_sample_facts([facts[0], with_advantage])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"loss_type": "sapo", "delta": 2.0}, "delta is set"),
        ({"delta": 1.1}, "delta is 1.1"),
        ({"loss_type": "dr_grpo"}, "max_completion_length"),
        ({"max_completion_length": 9}, "max_completion_length is 9"),
        ({"kl_clamp": True, "kl_estimator": "k1"}, "kl_clamp"),
        ({"rollout_correction_of_kl": True}, "rollout_correction_of_kl"),
        ({"rollout_correction_minimum": 4.0}, "rollout_correction_minimum is 4.0"),
        ({"loss_on": "all"}, "loss_on"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        flow(**options)
