"""`wrap.evaluate` on packed rows and on micro-batches cut by tokens equals that of unpacked ones, for any number of
samples; `wrap.forward` runs unpacked, whatever the configuration is."""

from __future__ import annotations

from typing import Any

import _engine_runs as runs
import numpy
import pytest
from _covering import covering
from test_packing import samples as pairs_or_texts

PACKING, BUDGET = "megatron_wrap.flow.packing", "megatron_lm.train.common.max_tokens_per_micro_batch"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2-vpp2": (2, {"pp": 2, "layers_per_chunk": 1}),
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
    "tp2-sp-dp2": (4, {"tp": 2, "sp": True}),
}
CUTS: dict[str, dict[str, Any]] = {
    "packed": {PACKING: True},
    "packed-budget": {PACKING: True, BUDGET: 192},
    "budget": {BUDGET: 192},
}
FLOWS = {
    "gpt_sft": (),
    "gpt_dpo": ("megatron_wrap.flow.__select__=gpt_dpo", "megatron_wrap.models.reference=copy"),
}
SIZES = (16, 11, 1)
"""Two whole batches of 8; a batch and a small one; one sample, so that replicas and pipelines get fillers."""


def samples_of(flow: str) -> list[dict[str, Any]]:
    return runs.weighted_samples(16) if flow == "gpt_sft" else pairs_or_texts(flow)


@pytest.fixture(scope="module")
def unpacked(ranks):
    """unpacked(flow) -> evaluations and outputs on one process without packing."""
    made: dict[str, dict[str, Any]] = {}

    def evaluate(flow: str) -> dict[str, Any]:
        if flow not in made:
            overrides = (*FLOWS[flow], *runs.options())
            made[flow] = ranks(1).run(runs.evaluate_and_forward, overrides, samples_of(flow), SIZES)[0]
        return made[flow]

    return evaluate


CASES = [
    *("gpt_sft one packed", "gpt_sft pp2-vpp2 packed-budget", "gpt_sft dp2 budget", "gpt_sft cp2 packed-budget"),
    *("gpt_sft tp2-sp-dp2 budget", "gpt_dpo one budget", "gpt_dpo pp2-vpp2 packed", "gpt_dpo dp2 packed-budget"),
    *("gpt_dpo cp2 budget", "gpt_dpo tp2-sp-dp2 packed-budget"),
]
"""Flow, layout and cut; a pipeline takes micro-batches of one shape, so it refuses `budget` alone."""


@pytest.mark.parametrize("case", covering(CASES, lambda case: {case.split()[0] + case.split()[2], case.split()[1]}))
def test_evaluation_does_not_depend_on_the_cut(case, ranks, unpacked):
    flow, layout, cut = case.split()
    world_size, settings = LAYOUTS[layout]
    expected = unpacked(flow)
    overrides = (*FLOWS[flow], *runs.options(**settings, **CUTS[cut]))
    for actual in ranks(world_size).run(runs.evaluate_and_forward, overrides, samples_of(flow), SIZES):
        assert actual["unchanged"]
        for metrics, reference in zip(actual["evaluations"], expected["evaluations"], strict=True):
            assert metrics.keys() == reference.keys()
            for name, value in reference.items():
                assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
        assert len(actual["outputs"]) == len(expected["outputs"]) == 16
        for rows, reference in zip(actual["outputs"], expected["outputs"], strict=True):
            assert rows.keys() == reference.keys()
            for name, row in reference.items():
                numpy.testing.assert_allclose(rows[name], row, rtol=1e-5, atol=1e-5)
