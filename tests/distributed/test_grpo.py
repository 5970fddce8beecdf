"""gpt_grpo compared with trl's GRPOTrainer on the same rollouts, and on several cuts and layouts."""

from __future__ import annotations

import json
import re
from typing import Any

import _grpo_runs as runs
import pytest
from _agreement import assert_layouts_agree
from _covering import quick
from _dpo_runs import CONFIG, COPY, TRAIN, initial_weights
from _started import refusal_of
from _trl_runs import model_of

from megatron_wrap.config import load_run_config
from megatron_wrap.testing.layouts import DEFAULT_LAYOUTS

OLD, REFERENCE, ROLLOUT = "old_log_probs", "reference_log_probs", "rollout_log_probs"
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 1.5, "beta": 0.1, "use_bias_correction_kl": False},
    "bnpo": {"loss_type": "bnpo", "scale_rewards": "batch"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 24, "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "beta": 0.1, "mask_truncated_completions": True, "entropy_coefficient": 0.02},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1, "top_entropy_quantile": 0.6},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.5},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "beta": 0.1},
    "entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.3, "entropy_coefficient": 0.05},
    "token_truncate": {"rollout_correction": "token_truncate", "rollout_correction_threshold": 1.2},
    "token_mask": {"rollout_correction": "token_mask", "rollout_correction_minimum": 0.7},
    "sequence_truncate": {"rollout_correction": "sequence_truncate", "rollout_correction_threshold": 1.5},
    "sequence_mask": {"rollout_correction": "sequence_mask", "rollout_correction_minimum": 0.5},
}
QUICK = ("grpo", "entropy")
WIDE = ("megatron_lm.model.arch.init_method_std=0.2",)
"""Initial weights whose entropies differ by more than the rounding of fp32, so that a quantile separates them."""
ROUNDING = 1e-5
"""Of a loss, a mean of terms of both signs near 1, and of kl, a mean of small differences of them."""
LARGEST_TERM = {"cispo": 7, "sequence_mask": 3}
"""Size of a loss's terms where it is not 1: log-probabilities, importance ratios of sequences up to 2.9."""
OF_TRL = {
    "entropy_coefficient": "entropy_coef",
    "rollout_correction": "vllm_importance_sampling_mode",
    "rollout_correction_threshold": "vllm_importance_sampling_clip_max",
    "rollout_correction_minimum": "vllm_importance_sampling_clip_min",
}
SHARED = (
    "completions/",
    "sampling/",
    "clip_ratio/",
    "cispo_clip_ratio",
    "reward",
    "frac_reward_zero_std",
    "kl",
    "entropy",
)


def overrides_of(options: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"megatron_wrap.flow.{key}={json.dumps(value)}" for key, value in options.items())


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_steps_agree_with_trl(ranks, tmp_path, name):
    """trl has the eight responses of a step in one micro-batch; we have four micro-batches, and groups across two. Ten
    steps in each command, four with --all."""
    steps = runs.STEPS if name in QUICK else 4
    options, config = CASES[name], load_run_config(CONFIG, runs.GRPO)
    initial = WIDE if "top_entropy_quantile" in options else ()
    weights = ranks(1).run(initial_weights, (*runs.GRPO, *initial))[0]
    corrected = "rollout_correction" in options
    noise = {ROLLOUT: 0.3} if corrected else {OLD: 0.2}
    samples = runs.with_log_probs(runs.rollouts(steps * runs.BATCH), model_of(config, weights), noise)
    second = COPY if options.get("beta") else ()
    overrides = (*initial, *second, *overrides_of(options), f"{TRAIN}.micro_batch_size=2")
    measured = ranks(1).run(runs.train, overrides, samples, steps)[0]
    of_trl = {OF_TRL.get(key, key): value for key, value in options.items()}
    reference = model_of(config, weights) if second else None
    theirs = runs.steps_of_trl(config, model_of(config, weights), samples, tmp_path, reference, **of_trl)
    assert len(measured) == len(theirs) == steps
    compared = {metric for metric in theirs[0] if metric.startswith(SHARED)} & measured[0].keys()
    assert {"entropy", "reward", "completions/mean_terminated_length"} <= compared
    assert ("kl" in compared) == bool(second)
    assert ("sampling/importance_sampling_ratio/min" in compared) == corrected
    for step, (ours, expected) in enumerate(zip(measured, theirs, strict=True)):
        for metric in ("loss", "grad_norm", *compared):
            floor = {"loss": ROUNDING * LARGEST_TERM.get(name, 1), "kl": ROUNDING}.get(metric, 0.0)
            assert ours[metric] == pytest.approx(expected[metric], rel=1e-4, abs=floor), f"{metric} of step {step}"


LAYOUTS = ("mbs1", "packed", "token-budget-dp2", "packed-cp2", "tp2-sp", "pp2-vpp2", "dp2-dopt", "cp2")
FURTHER = ("dp4-dopt", "pp4", "cp4", "pp2-vpp2-dp2-dopt")
PARITY: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "grpo": ({"loss_type": "grpo", "beta": 0.1, "epsilon": 0.1}, LAYOUTS),
    "grpo, all layouts": (
        {"loss_type": "grpo", "beta": 0.1, "epsilon": 0.1},
        tuple(layout for layout in (*DEFAULT_LAYOUTS, *FURTHER) if layout not in LAYOUTS),
    ),
    "entropy": (
        {"top_entropy_quantile": 0.5, "entropy_coefficient": 0.1},
        ("mbs1", "packed-cp2", "tp2-sp", "dp2-dopt"),
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "rollout_correction": "sequence_truncate"},
        ("packed-cp2", "pp2", "dp2"),
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2, "rollout_correction": "token_mask"},
        ("cp2", "token-budget-dp2"),
    ),
    "sapo": ({"loss_type": "sapo", "scale_rewards": "batch"}, ("packed", "tp2", "cp2")),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": 30, "mask_truncated_completions": True},
        ("mbs1", "packed-cp2", "pp2"),
    ),
}


def of_lengths() -> list[dict[str, Any]]:
    """Responses of very unequal lengths; one is longer than a sequence and one has no token with a loss."""
    samples = runs.rollouts(16)
    samples[1]["response_mask"] = [0] * len(samples[1]["response_ids"])
    samples[6] = {**samples[6], "response_ids": list(range(3, 103)), "response_mask": [1] * 100}
    samples[9] = {**samples[9], "response_ids": [7], "response_mask": [1]}
    for index, sample in enumerate(samples):
        length = len(sample["response_ids"])
        sample[OLD] = [-6.2 - 0.02 * ((index + token) % 5) for token in range(length)]
        sample[ROLLOUT] = [None if token % 7 == 6 else value + 0.1 for token, value in enumerate(sample[OLD])]
        sample[REFERENCE] = [-6.3] * length
    return samples


@pytest.mark.parametrize("name", quick(PARITY, ("grpo",)))
def test_the_objective_does_not_depend_on_the_cut_or_the_layout(ranks, name):
    options, layouts = PARITY[name]
    overrides = ["megatron_wrap.flow.__select__=gpt_grpo", *overrides_of(options)]
    # the samples have old log-probabilities, so ratios differ from the first step on
    assert_layouts_agree(ranks, layouts, overrides, of_lengths())


def test_three_cuts_agree(ranks):
    """By 1, 2 and 4 responses, on one and two replicas: within rounding of fp32."""
    options = {
        "beta": 0.1,
        "top_entropy_quantile": 0.5,
        "entropy_coefficient": 0.02,
        "rollout_correction": "token_mask",
    }
    measured = [
        ranks(replicas).run(
            runs.train, (*overrides_of(options), f"{TRAIN}.micro_batch_size={size}"), of_lengths()[:8], 1
        )
        for replicas, size in ((1, 4), (1, 1), (2, 2))
    ]
    expected = measured[0][0][0]
    for metrics in (measured[1][0][0], measured[2][0][0], measured[2][1][0]):
        for metric in ("loss", "grad_norm", "kl", "entropy", "reward_std", "clip_ratio/region_mean"):
            assert metrics[metric] == pytest.approx(expected[metric], rel=1e-6), metric


def test_log_probabilities_of_forward_are_those_of_the_first_update(ranks):
    """The ratios of the first of two updates are 1; those of the second are not."""
    samples = runs.rollouts(runs.BATCH)
    sampled = [{**sample, REFERENCE: None} for sample in samples]
    first, second = ranks(1).run(runs.several_updates, overrides_of({"epsilon": 1e-4}), sampled)[0]
    assert first["clip_ratio/region_mean"] == 0
    assert second["clip_ratio/region_mean"] > 0.1
    plain = ranks(1).run(runs.train, overrides_of({"epsilon": 1e-4}), samples, 1)[0][0]
    assert first["loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-7)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another length": (
        {},
        {OLD: [-1.0] * 2},
        r"old_log_probs.*2 values.*sample 2 of a batch of 8|sample 2 .*old_log_probs",
    ),
    "not finite": ({}, {"reward": float("inf")}, r'sample 2 of a batch of 8: "reward" is inf'),
    "no tokens": ({}, {"response_ids": [], "response_mask": []}, "sample 2 of a batch of 8: .* no tokens"),
    "no group": ({}, {"group": None}, 'sample 2 of a batch of 8: .*"group"'),
    "group of one": ({}, {"group": "alone"}, "sample 2 of a batch of 8 is the only one of its group"),
    "a key of one": (
        {},
        {ROLLOUT: [-1.0] * 99},
        'sample 2 of a batch of 8 has "rollout_log_probs" and sample 0 has none',
    ),
    "no reference": ({"beta": 0.1}, {}, "beta is 0.1 .*models.reference: copy"),
    "no rollout": ({"rollout_correction": "token_mask"}, {}, "rollout_correction is token_mask .*rollout_log_probs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_error(ranks, case):
    options, change, message = WRONG[case]
    samples = runs.rollouts(runs.BATCH)
    if len(change.get(ROLLOUT, ())) > 9:
        change = {ROLLOUT: [-1.0] * len(samples[2]["response_ids"])}
    samples[2] |= change
    measured = ranks(1).run(refusal_of, runs.train, overrides_of(options), samples, 1)[0]
    assert re.search(message, measured), measured
