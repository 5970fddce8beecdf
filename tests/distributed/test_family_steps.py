"""Families of 2025 and later: five steps of training and greedy completions are those of transformers, on one covering
array of families, layouts and rows (padded or packed). `test_bridge.py` has the logits and the exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs as runs
import _generate_runs
import numpy
import pytest
from _hf_training_runs import train_ours, train_transformers
from _layouts import layout

STEPS = 5
QUICK = {
    ("smollm3", "cp2-packed"),
    ("glm4-moe-lite", "tp2-pp2"),
    ("gpt-oss", "cp2"),
    ("mistral4", "ep2"),
    ("qwen3.5", "tp2-packed"),
    ("qwen3-next", "ep2-packed"),
}
"""Each layout, and models of each kind; `test_bridge.py` has the logits of every family."""
CASES = [
    (family, name)
    for number, family in enumerate(runs.NEW_FAMILIES)
    for name in ("cp2", "tp2-packed", "ep2", "tp2-pp2", "cp2-packed", "ep2-packed")
    if (family, name) in QUICK
    or name == ("tp2-packed", "cp2-packed")[number % 2]
    or (name == ("ep2-packed", "ep2")[number % 2] and family in runs.EXPERTS)
]
"""(family, layout), where neighbors have what the other one lacks. Layouts of each kind of attention and of experts are
compared with one rank in `test_parity.py`."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """theirs(family) -> the folder, and transformers' (loss, norm) of each step and completions."""

    def expected(folder: Path) -> Any:
        return train_transformers(folder, STEPS), _generate_runs.expected_greedy(folder)

    return runs.made_once(tmp_path_factory, expected)


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, id="-".join(case), marks=() if case in QUICK else pytest.mark.matrix) for case in CASES],
)
def test_five_steps_and_greedy_completions_are_those_of_transformers(family, name, ranks, theirs, tmp_path):
    folder, (steps, completions) = theirs(family)
    processes, overrides = layout(name)
    arguments = (str(folder), overrides, str(tmp_path), STEPS, _generate_runs.prompts())
    actual, _, greedy = ranks(processes).run(train_ours, *arguments)[0]
    numpy.testing.assert_allclose(actual, steps, rtol=1e-4)
    assert greedy == completions
