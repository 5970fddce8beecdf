"""Preference optimization compared with trl on the same model and pairs, on several layouts and with a resume."""

from __future__ import annotations

from typing import Any

import _dpo_runs as runs
import pytest
from _checkpoint_runs import CP2, DROPOUT, PP2, TP2, in_new_processes
from _covering import axes, covering, quick
from _dpo_runs import COPY
from _layouts import layout
from _trl_runs import model_of, on_tokens, steps_of_trl

from megatron_wrap.config import load_run_config

ROUNDING = 3e-6
"""Rounding error of a margin: log-probabilities near -120 have an ulp of 7.6e-6 in fp32; four of them times beta."""
LAYOUTS = ("one", "tp2", "pp2-vpp2", "cp2", "dp2", "tp2-pp2", "cp2-dp2")


@pytest.fixture(scope="module")
def of_trl(ranks, tmp_path_factory) -> list[dict[str, Any]]:
    """trl's metrics of ten steps, each of two micro-batches."""
    from trl import DPOConfig, DPOTrainer

    config = load_run_config(runs.CONFIG, runs.DPO)
    weights = ranks(1).run(runs.initial_weights, runs.DPO)[0]
    policy, reference = model_of(config, weights), model_of(config, weights)
    folder, trainer = tmp_path_factory.mktemp("trl"), on_tokens(DPOTrainer)
    return steps_of_trl(trainer, DPOConfig, config, policy, runs.pairs(), folder, reference, micro_batches=2, beta=0.1)


# test_reference_free.py compares pairs on dp2 and pp2 with trl
@pytest.mark.parametrize("name", covering(LAYOUTS, lambda name: axes(name) - {"dp2", "pp2", "vpp2"}))
def test_ten_steps_agree_with_trl(ranks, of_trl, name):
    processes, overrides = layout(name)
    batch = f"{runs.TRAIN}.micro_batch_size={1 if processes > 1 else 2}"
    measured = ranks(processes).run(runs.train, (*COPY, *overrides, batch), runs.pairs())[0]
    assert measured[-1]["rewards/margins"] > measured[1]["rewards/margins"] > measured[0]["rewards/margins"] == 0
    for step, (ours, theirs) in enumerate(zip(measured, of_trl, strict=True)):
        for metric, value in ours.items():
            assert value == pytest.approx(theirs[metric], rel=1e-4, abs=ROUNDING), f"{metric} of step {step}"


@pytest.mark.parametrize("name", quick(("one", "tp2", "pp2-vpp2", "cp2", "dp2-dopt"), ("one",)))
def test_a_resume_after_three_of_six_steps_is_bit_exact(tmp_path, name, ranks):
    processes, of_layout = layout(name)
    overrides = (*COPY, *of_layout, *DROPOUT, f"{runs.TRAIN}.save={tmp_path}", f"{runs.TRAIN}.micro_batch_size=1")
    straight = ranks(processes).run(runs.train, overrides, runs.pairs(), 6, 3)[0]
    saved_once = (tmp_path / "reference" / "iter_0000000" / ".metadata").stat().st_mtime_ns
    resumed = in_new_processes(processes, runs.train, overrides, runs.pairs(), 6, 6)[0]
    assert len(resumed) == 3
    assert straight[3:] == resumed
    assert (tmp_path / "reference" / "iter_0000000" / ".metadata").stat().st_mtime_ns == saved_once


@pytest.mark.matrix
def test_a_run_resumes_on_another_layout_with_its_reference(ranks, tmp_path):
    overrides = (*COPY, f"{runs.TRAIN}.save={tmp_path}", f"{runs.TRAIN}.micro_batch_size=1")
    straight = ranks(2).run(runs.train, (*overrides, *TP2), runs.pairs(), 6, 3)[0]
    resumed = ranks(2).run(runs.train, (*overrides, *PP2), runs.pairs(), 6)[0]
    for ours, theirs in zip(resumed, straight[3:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=ROUNDING)


def test_outputs_of_forward_replace_the_reference_model(ranks):
    """The samples contain precomputed log-probabilities instead of those of a reference model."""
    samples = runs.with_reference(ranks(2).run(runs.outputs, CP2, runs.pairs())[0])
    measured = ranks(1).run(runs.train, (), samples, 4)[0]
    with_model = ranks(1).run(runs.train, COPY, runs.pairs(), 4)[0]
    for ours, theirs in zip(measured, with_model, strict=True):
        if ours is measured[0]:  # margins are 0 up to rounding of either sign
            assert ours.pop("rewards/accuracies") >= theirs.pop("rewards/accuracies") == 0
        assert ours == pytest.approx(theirs, rel=1e-5, abs=ROUNDING)
    both = ranks(1).run(runs.refusal, COPY, samples)[0]
    assert "reference_chosen_log_probs, reference_rejected_log_probs" in both


@pytest.fixture(scope="module")
def evaluated_on_one_rank(ranks):
    return ranks(1).run(runs.evaluation, COPY, runs.pairs(), 3)[0]


@pytest.mark.parametrize("name", quick(("tp2", "pp2-vpp2", "cp2", "dp2"), ("pp2-vpp2",)))
def test_an_evaluation_uses_the_reference(ranks, evaluated_on_one_rank, name):
    assert abs(evaluated_on_one_rank["eval/set/rewards/margins"]) > 1e-3
    processes, overrides = layout(name)
    overrides = (*COPY, *overrides, f"{runs.TRAIN}.micro_batch_size=1")
    metrics = ranks(processes).run(runs.evaluation, overrides, runs.pairs(), 3)[0]
    assert metrics == pytest.approx(evaluated_on_one_rank, rel=1e-4, abs=ROUNDING)


def test_a_missing_reference_is_refused(ranks, tmp_path):
    message = ranks(1).run(runs.refusal, (), runs.pairs())[0]
    assert "megatron_wrap.models.reference: copy" in message
    save = (f"{runs.TRAIN}.save={tmp_path}",)
    samples = [
        {**pair, "reference_chosen_log_probs": -9.0, "reference_rejected_log_probs": -9.5} for pair in runs.pairs()
    ]
    ranks(1).run(runs.train, save, samples, 2, 2)
    message = ranks(1).run(runs.refusal, (*save, *COPY), runs.pairs())[0]
    assert f"{tmp_path} contains no reference model" in message
    assert "finetune: true" in message
