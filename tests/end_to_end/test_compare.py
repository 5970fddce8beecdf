"""scripts/benchmark/compare.py on a tiny model: every program trains, and regressions are found."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "compare.py"
LR = "megatron_lm.train.learning-rate.lr"


pytestmark = pytest.mark.matrix


def compare(folder: Path, preset: str, steps: int, *words: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """What the script prints, and its results."""
    counts = ("--platform", "cpu", "--steps", str(steps), "--warmup", "1", "--rounds", "1")
    command = [sys.executable, str(SCRIPT), preset, *counts, "--output", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "compare.json").read_text())


def assert_untrained(programs: dict[str, Any]) -> None:
    for name, program in programs.items():
        assert program["first_loss"] == pytest.approx(math.log(4096), abs=0.15), name


def test_programs_learn_alike_and_are_compared_with_an_earlier_run(tmp_path: Path) -> None:
    words = (f"{LR}=1e-3", "--variant", "ours-sgd: megatron_lm.train.optimizer.optimizer=sgd")
    _, results = compare(tmp_path, "tiny", 3, *words)
    programs = results["presets"]["tiny"]["programs"]
    assert list(programs) == ["ours", "ours-sgd", "trainer", "bare", "bare-best", "trl"]
    assert_untrained(programs)
    adam = [program["last_loss"] for name, program in programs.items() if name != "ours-sgd"]
    assert max(adam) - min(adam) < 0.25  # the same tokens, of other initial weights
    assert max(adam) < programs["ours-sgd"]["last_loss"] - 0.3
    programs["ours"]["peak_memory_gib"] /= 4
    (tmp_path / "old.json").write_text(json.dumps(results))
    against = ("--against", "", "--compare", str(tmp_path / "old.json"), "--threshold", "0.99")
    printed, _ = compare(tmp_path / "again", "tiny", 3, *words, *against, code=1)
    assert "ours: REGRESSION" in printed


def test_adapters_beside_the_trainer_with_peft(tmp_path: Path) -> None:
    _, results = compare(tmp_path, "tiny-lora-mixed", 2, "--against", "trainer,bare", "--fresh", f"{LR}=1e-2")
    programs = results["presets"]["tiny-lora-mixed"]["programs"]
    assert list(programs) == ["ours", "trainer"]  # the bare loop has no adapters
    assert "peft, padding-free" in programs["trainer"]["notes"]
    assert_untrained(programs)
    for name, program in programs.items():
        assert program["last_loss"] < program["first_loss"] - 0.1, name


@pytest.mark.parametrize("preset", ["tiny-deepseek", "tiny-gpt-oss", "tiny-qwen3.5"])
def test_experts_learn_like_those_of_transformers(preset: str, tmp_path: Path) -> None:
    _, results = compare(tmp_path, preset, 3, "--against", "trainer", f"{LR}=1e-3")
    programs = results["presets"][preset]["programs"]
    assert list(programs) == ["ours", "trainer"]
    assert_untrained(programs)
    assert programs["ours"]["last_loss"] == pytest.approx(programs["trainer"]["last_loss"], abs=0.1)
