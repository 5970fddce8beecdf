"""Reward models: compared with trl and transformers on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _dpo_runs as runs
import pytest
import torch
from _checkpoint_runs import CP2, PP2, TP2
from _covering import quick
from _dpo_runs import CONFIG, pairs
from _layouts import PACKED, layout
from _started import refusal_of
from _trl_runs import on_tokens, steps_of_trl

from megatron_wrap.config import load_run_config

VALUE = ("megatron_wrap.model_provider.provider_key=gpt_value_model",)
FROM = "megatron_wrap.model_provider.hf_path"
ROUNDING = {"margin": 8e-5, "mean_reward": 8e-5, "min_reward": 8e-5, "max_reward": 8e-5, "num_tokens": 0.0}
"""1e-4 of the largest score, 0.8: rounding of scores after ten steps, their mean and their differences; it depends
on the processor's kernels."""
CASES = ("plain one", "plain tp2-pp2", "centered-margin cp2-packed")
VARIANTS = {"plain": ({}, False), "centered-margin": ({"center_rewards_coefficient": 0.3}, True)}


def samples(with_margin: bool) -> list[dict[str, Any]]:
    """Pairs, and a margin for each."""
    return [{**pair, **({"margin": 0.1 * (at % 7)} if with_margin else {})} for at, pair in enumerate(pairs())]


@pytest.fixture(scope="module")
def exported(ranks, tmp_path_factory) -> Path:
    """The folder of a value model with initial weights, exported from two pipeline stages of two ranks."""
    folder = tmp_path_factory.mktemp("value") / "hf"
    overrides = (*runs.of_flow("gpt_reward", {}), *VALUE, *TP2, *PP2, f"{runs.TRAIN}.micro_batch_size=1")
    ranks(4).run(runs.export, str(folder), overrides)
    return folder


@pytest.fixture(scope="module")
def of_trl(exported, tmp_path_factory):
    """variant -> trl's metrics of ten steps from the exported folder, on the same pairs in the same order."""
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    measured: dict[str, list[dict[str, float]]] = {}

    def steps(name: str) -> list[dict[str, float]]:
        if name not in measured:
            options, with_margin = VARIANTS[name]
            model = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32, pad_token_id=0)
            pairs = [
                {
                    "chosen_ids": pair["prompt_ids"] + pair["chosen_ids"],
                    "rejected_ids": pair["prompt_ids"] + pair["rejected_ids"],
                    **({"margin": pair["margin"]} if with_margin else {}),
                }
                for pair in samples(with_margin)
            ]
            config = load_run_config(CONFIG, (*runs.of_flow("gpt_reward", {}), *VALUE))
            trainer, folder = on_tokens(RewardTrainer), tmp_path_factory.mktemp("trl")
            measured[name] = steps_of_trl(trainer, RewardConfig, config, model, pairs, folder, **options)
        return measured[name]

    return steps


@pytest.mark.parametrize("case", quick(CASES, ("plain one", "centered-margin cp2-packed")))
def test_ten_steps_agree_with_trl(ranks, of_trl, case):
    variant, name = case.split()
    processes, overrides = layout(name)
    options, with_margin = VARIANTS[variant]
    batch = f"{runs.TRAIN}.micro_batch_size=2"
    selected = (*runs.of_flow("gpt_reward", options), *VALUE, *overrides, batch)
    measured = ranks(processes).run(runs.steps, selected, samples(with_margin))[0]
    for step, (ours, theirs) in enumerate(zip(measured, of_trl(variant), strict=True)):
        for metric in ("loss", "grad_norm", "accuracy", *ROUNDING):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=ROUNDING.get(metric, 0.0)), (
                f"{metric} of step {step}"
            )


def _scores_of_transformers(folder: Path, sequences: list[list[int]]) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in sequences]


CHOSEN = [pair["prompt_ids"] + pair["chosen_ids"] for pair in pairs(6)]
SINGLE = [{"input_ids": ids} for ids in CHOSEN]
ARCH = "megatron_lm.model.arch"


def test_transformers_and_a_run_from_the_folder_give_the_same_scores(ranks, exported):
    expected = _scores_of_transformers(exported, CHOSEN)
    assert max(expected) - min(expected) > 1e-3
    overrides = (*runs.of_flow("gpt_reward", {}), *VALUE)
    from_folder = [*overrides, *CP2, f"{FROM}={exported}"]
    measured = ranks(2).run(runs.outputs, from_folder, SINGLE)[0]
    assert [output["score"] for output in measured] == pytest.approx(expected, abs=1e-5)
    in_pairs = ranks(1).run(runs.outputs, (*overrides, *PACKED), pairs(6))[0]
    assert [output["chosen_score"] for output in in_pairs] == pytest.approx(expected, abs=1e-5)


FAMILIES = {
    "qwen2": ("add_qkv_bias=true", "untie_embeddings_and_output_weights=false", "norm_epsilon=1e-6"),
    "qwen3": ("qk_layernorm=true", "untie_embeddings_and_output_weights=true", "norm_epsilon=1e-6"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_of_another_family(ranks, tmp_path, family):
    """A tied embedding is not tied to the head."""
    overrides = [*runs.of_flow("gpt_reward", {}), *VALUE, *(f"{ARCH}.{value}" for value in FAMILIES[family])]
    ours = ranks(1).run(runs.export, str(tmp_path / "hf"), overrides, pairs(4), SINGLE)[0]
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["architectures"] == [f"{family.capitalize()}ForSequenceClassification"]
    assert _scores_of_transformers(tmp_path / "hf", CHOSEN) == pytest.approx(ours, abs=1e-5)


def test_a_folder_of_a_causal_language_model_starts_a_value_model(ranks, tmp_path):
    """All weights but the head are the folder's; the head has its initial weights, the same on every layout."""
    language_model = (*runs.of_flow("gpt_sft", {}), "megatron_lm.train.common.seed=5")
    ranks(1).run(runs.export, str(tmp_path / "lm"), language_model)
    overrides = (*runs.of_flow("gpt_reward", {}), *VALUE, f"{FROM}={tmp_path / 'lm'}")
    weights = ranks(1).run(runs.initial_weights, overrides)[0]
    of_folder = ranks(1).run(runs.initial_weights, language_model)[0]
    fresh = ranks(1).run(runs.initial_weights, overrides[:-1])[0]
    assert (weights.pop("output_layer.weight") == fresh["output_layer.weight"]).all()
    of_folder.pop("output_layer.weight", None)
    assert weights.keys() == of_folder.keys()
    assert all((weights[name] == of_folder[name]).all() for name in weights)


def test_a_value_model_resumes_on_another_layout(ranks, tmp_path):
    save = (f"{runs.TRAIN}.save={tmp_path}", f"{runs.TRAIN}.micro_batch_size=1")
    overrides = (*runs.of_flow("gpt_reward", {}), *VALUE, *save)
    ranks(2).run(runs.steps, (*overrides, *TP2), pairs(), 2, 2)
    resumed = ranks(2).run(runs.steps, (*overrides, *PP2), pairs(), 4)[0]
    straight = ranks(1).run(runs.steps, overrides[:-2], pairs(), 4)[0]
    for ours, theirs in zip(resumed, straight[2:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def test_what_cannot_be_is_refused(ranks):
    """A flow on logits with values, a reward flow with logits, training on single sequences, generation."""
    reward = runs.of_flow("gpt_reward", {})
    for call, words in (
        ((runs.steps, (*runs.of_flow("gpt_sft", {}), *VALUE), ()), "needs logits"),
        ((runs.steps, reward, ()), "gpt_value_model"),
        ((runs.steps, (*reward, *VALUE), SINGLE), "chosen and rejected"),
        ((runs.complete, (*reward, *VALUE)), "cannot generate"),
    ):
        assert words in ranks(1).run(refusal_of, *call)[0]
