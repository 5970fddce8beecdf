"""Every preference loss compared with trl on the same model and samples; statistics of the step on several cuts."""

from __future__ import annotations

import json
from typing import Any

import _dpo_runs as runs
import pytest
from _agreement import assert_layouts_agree
from _covering import quick
from _dpo_runs import COPY
from _trl_runs import model_of, on_tokens, steps_of_trl

from megatron_wrap.config import load_run_config

ROUNDING = 1e-5
"""Rounding error of a reward: log-probabilities near -120 have an ulp of 7.6e-6 in fp32; several of them times beta,
and the policies differ by rounding after some steps."""
PAIR_TYPES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard"),
    *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft"),
)
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
CASES: dict[str, dict[str, Any]] = {
    name: {"loss_type": [name], **({"label_smoothing": 0.1} if name in SMOOTHED else {})} for name in PAIR_TYPES
}
CASES |= {
    "list": {"loss_type": ["sigmoid", "aot", "sft"], "loss_weights": [0.5, 0.25, 0.1]},
    "forward_kl": {"loss_type": ["sigmoid"], "f_divergence_type": "forward_kl"},
    "js_divergence": {"loss_type": ["ipo"], "f_divergence_type": "js_divergence"},
    "alpha_divergence": {"loss_type": ["hinge"], "f_divergence_type": "alpha_divergence"},
    "ld_alpha": {"loss_type": ["sigmoid"], "ld_alpha": 0.4},
    "use_weighting": {"loss_type": ["sigmoid"], "use_weighting": True},
}
QUICK = ("list", "use_weighting")


@pytest.fixture(scope="module")
def weights(ranks) -> Any:
    return ranks(1).run(runs.initial_weights, runs.DPO)[0]


def overrides_of(options: dict[str, Any], flow: str = "gpt_dpo") -> tuple[str, ...]:
    keys = tuple(f"megatron_wrap.flow.{key}={json.dumps(value)}" for key, value in options.items())
    return (f"megatron_wrap.flow.__select__={flow}", *keys, f"{runs.TRAIN}.micro_batch_size=2")


def compare(measured: list[dict[str, float]], of_trl: list[dict[str, float]], rounding: float = ROUNDING) -> None:
    assert len(measured) == len(of_trl)
    for step, (ours, theirs) in enumerate(zip(measured, of_trl, strict=True)):
        for metric, value in ours.items():
            if metric in theirs and not (step == 0 and metric == "rewards/accuracies"):  # margins of 0 up to rounding
                floor = rounding * (10 if metric == "kl" else 1)  # kl is not multiplied by beta
                assert value == pytest.approx(theirs[metric], rel=1e-4, abs=floor), f"{metric} of step {step}"


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_steps_of_pairs_agree_with_trl(ranks, weights, tmp_path, name):
    """trl has the four pairs of a step in one micro-batch; we have two micro-batches. Ten steps in each command, four
    with --all."""
    from trl import DPOConfig, DPOTrainer

    config = load_run_config(runs.CONFIG, runs.DPO)
    steps = 10 if name in QUICK else 4
    samples = runs.pairs(steps * runs.BATCH)
    measured = ranks(1).run(runs.train, (*COPY, *overrides_of(CASES[name])), samples, steps)[0]
    policy, reference = model_of(config, weights), model_of(config, weights)
    of_trl = steps_of_trl(
        on_tokens(DPOTrainer), DPOConfig, config, policy, samples, tmp_path, reference, beta=0.1, **CASES[name]
    )
    # at the start the two gradients of apo_down for a chosen answer cancel, and Adam amplifies their rounding
    compare(measured, of_trl, 3 * ROUNDING if name == "apo_down" else ROUNDING)


def answers(count: int = 40) -> list[dict[str, Any]]:
    """Chosen and rejected answers in turn, not balanced."""
    return [
        {"prompt_ids": pair["prompt_ids"], "completion_ids": pair[f"{kind}_ids"], "label": kind == "chosen"}
        for index, pair in enumerate(runs.pairs(count))
        for kind in ["rejected" if index % 3 == 0 else "chosen"]
    ]


@pytest.mark.parametrize("loss_type", ["kto", pytest.param("apo_zero_unpaired", marks=pytest.mark.matrix)])
def test_ten_steps_of_single_answers_agree_with_trl(ranks, weights, tmp_path, loss_type):
    from trl import KTOConfig, KTOTrainer

    config, samples = load_run_config(runs.CONFIG, runs.DPO), answers()
    options = {"loss_type": loss_type, "desirable_weight": 1.3, "undesirable_weight": 0.7, "beta": 0.1}
    measured = ranks(1).run(runs.train, (*COPY, *overrides_of(options, "gpt_kto")), samples)[0]
    with_neighbors = [
        {**sample, "KL_completion_ids": samples[index - index % 4 + (index - 1) % 4]["completion_ids"]}
        for index, sample in enumerate(samples)
    ]
    if loss_type != "kto":
        with_neighbors = samples
    policy, reference = model_of(config, weights), model_of(config, weights)
    of_trl = steps_of_trl(
        on_tokens(KTOTrainer), KTOConfig, config, policy, with_neighbors, tmp_path, reference, **options
    )
    compare(measured, of_trl)
    assert loss_type != "kto" or max(step["kl"] for step in measured) > 1e-4


STATISTICS: dict[str, tuple[str, dict[str, Any]]] = {
    "aot": ("gpt_dpo", {"loss_type": ["aot", "aot_unpaired", "sft"], "ld_alpha": 0.5}),
    "kto": ("gpt_kto", {}),
}


@pytest.mark.parametrize("name", ["kto", pytest.param("aot", marks=pytest.mark.matrix)])
def test_an_evaluation_has_statistics_of_its_batches(ranks, name):
    """Seven samples are a batch of four and one of three."""
    flow, options = STATISTICS[name]
    samples = answers() if flow == "gpt_kto" else runs.pairs()
    common = (*COPY, *overrides_of(options, flow)[:-1])
    expected = ranks(1).run(runs.evaluation, (*common, f"{runs.TRAIN}.micro_batch_size=4"), samples, 2)[0]
    for processes, size in ((1, 1), (2, 1)):
        overrides = (*common, f"{runs.TRAIN}.micro_batch_size={size}")
        measured = ranks(processes).run(runs.evaluation, overrides, samples, 2)[0]
        assert measured == pytest.approx(expected, rel=1e-4, abs=ROUNDING), (processes, size)


def test_statistics_of_the_inputs_agree_on_each_cut(ranks):
    layouts = ["mbs1", "packed", "token-budget-dp2", "cp2", "pp2"]
    flow = "_engine_flows:RelativeLengthFlow"
    samples = [{"input_ids": [7 + index] * (3 + 2 * index), "loss_mask": [1] * (3 + 2 * index)} for index in range(16)]
    overrides = ["megatron_wrap.flow.__select__=gpt_sft"]
    assert_layouts_agree(ranks, layouts, overrides, samples, flow=flow)
