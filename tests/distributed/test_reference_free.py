"""CPO, SimPO, AlphaPO and ORPO compared with trl on the same model and pairs."""

from __future__ import annotations

from typing import Any

import _dpo_runs as runs
import pytest
from _checkpoint_runs import CP2
from _covering import covering
from _dpo_runs import CONFIG, pairs
from _layouts import layout
from _trl_runs import as_text, model_of, on_numbers, steps_of_trl

from megatron_wrap.config import load_run_config

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cpo": ("gpt_cpo", {}),
    "cpo-smooth": ("gpt_cpo", {"label_smoothing": 0.2, "cpo_alpha": 0.5, "beta": 0.3}),
    "hinge": ("gpt_cpo", {"loss_type": "hinge"}),
    "ipo": ("gpt_cpo", {"loss_type": "ipo", "cpo_alpha": 0.3}),
    "simpo": ("gpt_cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7}),
    "alphapo": ("gpt_cpo", {"loss_type": "simpo", "alpha": 0.1, "beta": 2.5, "cpo_alpha": 0.1}),
    "orpo": ("gpt_orpo", {"beta": 0.3}),
}
COMPARED = {
    "cpo": "one",
    "cpo-smooth": "dp2",
    "hinge": "cp2",
    "ipo": "dp2",
    "simpo": "cp2",
    "alphapo": "one",
    "orpo": "tp2-pp2",
}
"""The layout of each comparison with trl; test_preference_parity.py compares the layouts."""
METRICS = ("loss", "grad_norm", "nll_loss", "rewards/chosen", "rewards/rejected", "rewards/margins")
METRICS += ("rewards/accuracies", "logps/chosen", "logps/rejected")


@pytest.fixture(scope="module")
def of_trl(ranks, tmp_path_factory):
    """variant -> trl's metrics of ten steps from the same weights on the same pairs in the same order."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    base = runs.of_flow("gpt_cpo", {})
    config = load_run_config(CONFIG, base)
    weights = ranks(1).run(runs.initial_weights, base)[0]
    measured: dict[str, list[dict[str, float]]] = {}

    def steps(name: str) -> list[dict[str, float]]:
        if name not in measured:
            flow, options = VARIANTS[name]
            trainer, settings = (ORPOTrainer, ORPOConfig) if flow == "gpt_orpo" else (CPOTrainer, CPOConfig)
            model, samples, folder = model_of(config, weights), as_text(pairs()), tmp_path_factory.mktemp("trl")
            measured[name] = steps_of_trl(
                on_numbers(trainer), settings, config, model, samples, folder, max_length=64, **options
            )
        return measured[name]

    return steps


@pytest.mark.parametrize(("variant", "name"), covering(COMPARED.items(), lambda case: {case[1], VARIANTS[case[0]][0]}))
def test_ten_steps_agree_with_trl(ranks, of_trl, variant, name):
    processes, overrides = layout(name)
    flow, options = VARIANTS[variant]
    extra = ("log_odds_chosen", "log_odds_ratio") if flow == "gpt_orpo" else ()
    batch = f"{runs.TRAIN}.micro_batch_size=1" if processes > 1 else f"{runs.TRAIN}.micro_batch_size=2"
    measured = ranks(processes).run(runs.steps, (*runs.of_flow(flow, options), *overrides, batch), pairs())[0]
    for step, (ours, theirs) in enumerate(zip(measured, of_trl(variant), strict=True)):
        for metric in (*METRICS, *extra):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=3e-6), f"{metric} of step {step}"


def test_forward_gives_the_log_probabilities_of_the_answers(ranks):
    reference_outputs = ranks(1).run(runs.outputs, runs.of_flow("gpt_orpo", {}), pairs())[0]
    as_dpo = ranks(2).run(runs.outputs, (*runs.of_flow("gpt_dpo", {}), *CP2), pairs())[0]
    for ours, theirs in zip(reference_outputs, as_dpo, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
