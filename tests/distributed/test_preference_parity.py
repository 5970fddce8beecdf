"""`check-parity` of the preference and reward flows: every layout, and micro-batches cut in several ways."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from _agreement import assert_layouts_agree
from _covering import each_axis_and_some
from _dpo_runs import COPY, TRAIN

from megatron_wrap.testing.layouts import DEFAULT_LAYOUTS

VALUE = ("megatron_wrap.model_provider.provider_key=gpt_value_model",)
FLOWS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "kto": ("gpt_kto", {}, COPY),
    "alphapo": ("gpt_cpo", {"loss_type": "simpo", "alpha": 0.1, "beta": 2.5, "cpo_alpha": 0.1}, ()),
    "orpo": ("gpt_orpo", {"beta": 0.3}, ()),
    "reward": ("gpt_reward", {"center_rewards_coefficient": 0.1}, VALUE),
    "aot": ("gpt_dpo", {"loss_type": ["aot", "aot_unpaired", "sft"], "ld_alpha": 0.5}, COPY),
    "weighted": ("gpt_dpo", {"loss_type": ["ipo", "bco_pair"], "use_weighting": True, "rpo_alpha": 0.3}, COPY),
}
"""Name -> flow, options, further overrides: each flow, and each statistic of answers and of batches. The other losses
are functions of the same sums; test_preference_losses.py and test_reference_free.py compare them with trl."""
LAYOUTS = (*DEFAULT_LAYOUTS, "packed-cp2", "dp4-dopt", "pp4", "cp4", "pp2-vpp2-dp2-dopt")


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


@pytest.mark.matrix
@pytest.mark.parametrize("name", FLOWS)
def test_layouts_agree(ranks, name):
    """Each flow on each axis, all together on every layout; other cuts of eight samples, which the reference has in
    four micro-batches of two, change a sum's order alone."""
    flow, options, further = FLOWS[name]
    keys = [f"megatron_wrap.flow.{key}={json.dumps(value)}" for key, value in options.items()]
    selected = [f"megatron_wrap.flow.__select__={flow}", *keys, *further, f"{TRAIN}.seq_length=48"]
    layouts = [*each_axis_and_some(LAYOUTS, list(FLOWS).index(name), 3), "mbs4"]
    steps = 2 if further == COPY else 1  # in the first step the policy is its reference
    for row in assert_layouts_agree(ranks, layouts, selected, samples(flow), steps=steps).rows:
        assert max(row.objective_difference, row.gradient_difference) < 1e-6 or not row.layout.startswith("mbs"), row
