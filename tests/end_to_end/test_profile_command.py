"""`megatron-wrap profile` on two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_wrap.profiling import kernel_kinds as kinds
from megatron_wrap.profiling.breakdown import break_down
from megatron_wrap.profiling.trace import read_timeline

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-llama-mock.yaml"
SMALL = ("megatron_lm.train.common.seq_length=32", "megatron_lm.train.common.global_batch_size=4")


@pytest.mark.matrix
def test_each_process_and_the_changes_are_reported(command, tmp_path):
    pipeline = "megatron_lm.model.parallel.pipeline_model_parallel_size=2"
    options = ("--steps", "2", "--warmup", "2", "--output", "out")
    ended = command(
        "megatron_wrap.cli.main", "profile", CONFIG, *SMALL, pipeline, "megatron_wrap.init.platform=cpu", *options
    )
    assert ended.code == 0, ended.out + ended.err
    folder = tmp_path / "out" / "iterations-3-4"
    report = json.loads((folder / "profile.json").read_text())
    ranks = report["ranks"]
    assert (report["iterations"], len(ranks), ranks[0]["num_steps"]) == ([3, 4], 2, 2)
    for rank in ranks:
        assert list(rank["milliseconds"]) == list(kinds.KINDS)
        assert sum(rank["milliseconds"].values()) == pytest.approx(rank["step_ms"])
        assert rank["milliseconds"][kinds.MATMUL] > 0
        assert rank["milliseconds"][kinds.COMMUNICATION] > 0
    assert ranks[0]["milliseconds"][kinds.LOSS] == 0  # of the last stage
    assert ranks[1]["milliseconds"][kinds.LOSS] > 0
    assert 0 < ranks[0]["computed_tokens"] == ranks[1]["computed_tokens"] <= 4 * 32
    expected = break_down(read_timeline(folder / "trace-rank0.json.gz"))
    assert expected.step_ms == pytest.approx(ranks[0]["step_ms"])
    table = (folder / "profile.txt").read_text()
    assert table in ended.out + ended.err
    assert "matmuls" in table
    assert not (tmp_path / "outputs").exists()


def test_more_steps_than_the_run_has(command):
    ended = command("megatron_wrap.cli.main", "profile", CONFIG, "--steps", "20", "megatron_wrap.init.platform=cpu")
    assert ended.code == 2
    assert "megatron_wrap.profile.steps" in ended.err
    assert "train_iters 10" in ended.err
