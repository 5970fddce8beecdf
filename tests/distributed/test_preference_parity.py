"""`check-parity` of the preference and reward flows: every layout, and micro-batches cut in several ways."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from _covering import each_axis_and_some
from _dpo_runs import CONFIG, COPY, TRAIN

from megatron_wrap.testing import check_parity
from megatron_wrap.testing.layouts import DEFAULT_LAYOUTS

VALUE = ("megatron_wrap.model_provider.provider_key=gpt_value_model",)
FLOWS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "kto": ("gpt_kto", {}, COPY),
    "alphapo": ("gpt_cpo", {"loss_type": "simpo", "alpha": 0.1, "beta": 2.5, "cpo_alpha": 0.1}, ()),
    "orpo": ("gpt_orpo", {"beta": 0.3}, ()),
    "reward": ("gpt_reward", {"center_rewards_coefficient": 0.1}, VALUE),
}
"""One loss of each flow: name -> flow, options, further overrides. `test_parity.py` has gpt_dpo."""
OTHERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "differences": ("gpt_dpo", {"loss_type": ["sigmoid", "sigmoid_norm", "robust"], "label_smoothing": 0.1}, COPY),
    "divergence": ("gpt_dpo", {"loss_type": ["hinge", "discopop"], "f_divergence_type": "js_divergence"}, COPY),
    "ratios": ("gpt_dpo", {"loss_type": ["exo_pair", "nca_pair", "sppo_hard"], "label_smoothing": 0.1}, COPY),
    "apo": ("gpt_dpo", {"loss_type": ["apo_zero", "apo_down"], "ld_alpha": 0.5}, COPY),
    "weighted": ("gpt_dpo", {"loss_type": ["ipo", "bco_pair"], "use_weighting": True, "rpo_alpha": 0.3}, COPY),
    "apo-unpaired": ("gpt_kto", {"loss_type": "apo_zero_unpaired", "undesirable_weight": 0.5}, COPY),
    "cpo": ("gpt_cpo", {"label_smoothing": 0.2, "cpo_alpha": 0.5}, ()),
    "hinge": ("gpt_cpo", {"loss_type": "hinge"}, ()),
    "ipo": ("gpt_cpo", {"loss_type": "ipo", "cpo_alpha": 0.3}, ()),
    "simpo": ("gpt_cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7}, ()),
    "aot": ("gpt_dpo", {"loss_type": ["aot", "aot_unpaired", "sft"], "ld_alpha": 0.5}, COPY),
}
"""The other losses, in lists where the flow has them, on the layouts of ON_SOME."""
ON_SOME = ("tp2-sp-cp2", "packed", "pp2-vpp2", "token-budget-dp2", "packed-cp2", "tp2-sp-pp2", "cp2", "dp2-dopt")
LAYOUTS = (*DEFAULT_LAYOUTS, "packed-cp2", "dp4-dopt", "pp4", "cp4", "pp2-vpp2-dp2-dopt")
CUTS = ("mbs1", "mbs4", "mbs8", "packed", "token-budget")
"""The other cuts of eight samples, which the reference has in four micro-batches of two."""


def samples(flow: str) -> list[dict[str, Any]]:
    """Sixteen pairs or answers: of very unequal lengths, with weights, and two that truncation leaves fully masked."""
    generator = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(3, 500) for _ in range(count)]

    pairs: list[dict[str, Any]] = [
        {
            "prompt_ids": tokens(generator.randint(1, 12)),
            "chosen_ids": tokens(1 if index % 3 == 0 else generator.randint(1, 30)),
            "rejected_ids": tokens(30 if index % 3 == 0 else generator.randint(1, 30)),
            "weight": [1.0, 0.5, 2.0, 1.0, 0.0][index % 5],
        }
        for index in range(16)
    ]
    pairs[2]["prompt_ids"] = tokens(100)  # longer than a sequence
    pairs[10]["prompt_ids"] = tokens(47)
    if flow == "gpt_reward":
        return [{**pair, "margin": 0.2 * index} for index, pair in enumerate(pairs)]
    if flow != "gpt_kto":
        return pairs
    answers = [(pair, "chosen_ids" if index % 3 else "rejected_ids") for index, pair in enumerate(pairs)]
    return [
        {
            "prompt_ids": pair["prompt_ids"],
            "completion_ids": pair[kind],
            "label": kind == "chosen_ids",
            "weight": pair["weight"],
        }
        for pair, kind in answers
    ]


def report_of(ranks: Any, case: tuple[str, dict[str, Any], tuple[str, ...]], layouts: Any) -> Any:
    """The report of check-parity; all layouts must have run and agree."""
    flow, options, further = case
    keys = [f"megatron_wrap.flow.{key}={json.dumps(value)}" for key, value in options.items()]
    selected = [f"megatron_wrap.flow.__select__={flow}", *keys, *further, f"{TRAIN}.seq_length=48"]
    steps = 2 if further == COPY else 1  # in the first step the policy is its reference
    result = check_parity(CONFIG, selected, samples=samples(flow), layouts=list(layouts), steps=steps, ranks=ranks)
    assert [row.layout for row in result.rows if row.agrees is not True] == [], result.table()
    return result


@pytest.mark.parametrize(
    ("name", "layouts"),
    # without the marker each flow is compared with trl on some layouts, and test_preference_losses.py cuts the batch in
    # several ways
    [
        pytest.param(name, each_axis_and_some(LAYOUTS, number, 4), id=name, marks=pytest.mark.matrix)
        for number, name in enumerate(FLOWS)
    ],
)
def test_layouts_agree(ranks, name, layouts):
    """Each flow on each axis, all together on every layout."""
    report_of(ranks, FLOWS[name], layouts)


@pytest.mark.matrix
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_losses_agree_on_some_layouts(ranks, name):
    """Two layouts each: together the losses have all layouts of ON_SOME."""
    index = list(OTHERS).index(name)
    report_of(ranks, OTHERS[name], [ON_SOME[index % 8], ON_SOME[(index + 3) % 8]])


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*FLOWS, "aot"])
def test_the_objective_does_not_depend_on_the_cut(ranks, name):
    """Packed rows compute attention in another order, whose rounding depends on the machine: they have tolerances of
    check-parity, which `report_of` asserts."""
    for row in report_of(ranks, {**FLOWS, **OTHERS}[name], CUTS).rows:
        assert row.objective_difference < 1e-6 or row.layout == "packed", row
        assert row.gradient_difference < 1e-6 or not row.layout.startswith("mbs"), row
