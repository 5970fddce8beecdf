"""examples/grpo: rollouts, rewards and optimization steps of a run that is ended and resumed are those of one run."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _started import refusal_of, without_measured

EXAMPLES = Path(__file__).parents[2] / "examples"


def grpo(*calls: Sequence[str]) -> list[str]:
    """Call examples/grpo/train.py with each list of words; the messages of those that ended with an error."""
    main = runpy.run_path(str(EXAMPLES / "grpo" / "train.py"))["main"]
    messages = [refusal_of(main, list(words)) for words in calls]
    sys.modules.pop("task", None)
    return messages


TRAIN = "megatron_lm.train.common"


def words(folder: Path, train_iters: int, updates: int = 1) -> list[str]:
    values = {
        f"{TRAIN}.train_iters": train_iters,
        f"{TRAIN}.save": folder / "checkpoints",
        f"{TRAIN}.save_interval": 2,
        f"{TRAIN}.eval_interval": 2,
        f"{TRAIN}.global_batch_size": 32,
        f"{TRAIN}.micro_batch_size": 8,
        "megatron_wrap.data.tokenizer": EXAMPLES / "grpo" / "tokenizer",
        "megatron_wrap.logger.output_dir": folder,
    }
    return ["--updates", str(updates), *(f"{name}={value}" for name, value in values.items())]


def records(folder: Path) -> dict[str, list[dict]]:
    """Lines of the run's files, without measured values."""
    actual = {}
    for name in ("rollouts", "held-out", "metrics"):
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        actual[name] = [without_measured(line) for line in lines]
    return actual


@pytest.mark.parametrize("updates", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_resumed_run_repeats_no_rollout_and_ends_as_one_run(updates, ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    calls = [words(whole, 4, updates), words(parts, 2, updates), words(parts, 4, updates)]
    assert ranks(1).run(grpo, *calls) == [["no error"] * 3]
    expected, actual = records(whole), records(parts)
    assert [line["iteration"] for line in expected["rollouts"]] == list(range(0, 4, updates))
    assert actual["rollouts"] == expected["rollouts"]
    assert [line["iteration"] for line in expected["held-out"]] == [0, 2, 4]
    assert actual["held-out"] == expected["held-out"]
    assert actual["metrics"] == expected["metrics"]
    assert all(0 < line["sampling/sampling_logp_difference/max"] < 1e-5 for line in expected["metrics"])
    ratios = [line["clip_ratio/region_mean"] for line in expected["metrics"]]
    assert len(ratios) == 4
    assert (updates == 1) == (sum(ratios) == 0)


def test_intervals_within_a_rollout_are_refused(ranks, tmp_path):
    [[message]] = ranks(1).run(grpo, words(tmp_path, 4, updates=4))
    assert "save_interval 2" in message
    assert "--updates 4" in message
