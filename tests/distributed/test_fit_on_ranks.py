"""`wrap.fit` on two ranks: all of them take the same steps and end after the same one."""

from __future__ import annotations

import json

import _fit_runs
import numpy
import pytest

PARALLEL = "megatron_lm.model.parallel"


@pytest.fixture
def folder(tmp_path):
    generator = numpy.random.default_rng(3)
    for name in ("train", "validation"):
        samples = [{"input_ids": generator.integers(0, 500, 20).tolist(), "loss_mask": [1] * 20} for _ in range(16)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return tmp_path


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="dp2"),
        pytest.param((f"{PARALLEL}.pipeline_model_parallel_size=2",), id="pp2", marks=pytest.mark.matrix),
    ],
)
def test_ranks_that_disagree_decide_alike(ranks, folder, layout):
    first, other = ranks(2).run(_fit_runs.fit, str(folder), layout, True)
    for result in (first, other):
        assert result[1] == 7  # only one rank's hook returned False
        assert [step["iteration"] for step in result[2]] == [*range(1, 8)]
    assert first[0]["best_value"] == other[0]["best_value"]
    assert first[0]["best_iteration"] == other[0]["best_iteration"] == 6  # by the evaluations of rank 0
    kept = sorted(path.name for path in (folder / "checkpoints").glob("iter_*"))
    assert kept == ["iter_0000006", "iter_0000007"]
    assert (folder / "checkpoints/best_checkpointed_iteration.txt").read_text() == "6"
