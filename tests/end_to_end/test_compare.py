"""scripts/benchmark/compare.py on a tiny model: every program trains, and regressions are found."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "compare.py"


@pytest.mark.matrix
def test_programs_learn_alike_and_are_compared_with_an_earlier_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "tiny",
        "--platform",
        "cpu",
        "--steps",
        "3",
        "--warmup",
        "1",
        "--rounds",
        "1",
    ]
    command += [
        "megatron_lm.train.learning-rate.lr=1e-3",
        "--variant",
        "ours-sgd: megatron_lm.train.optimizer.optimizer=sgd",
    ]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "compare.json").read_text())
    programs = results["presets"]["tiny"]["programs"]
    assert list(programs) == ["ours", "ours-sgd", "trainer", "bare", "bare-best", "trl"]
    for name, program in programs.items():
        assert program["first_loss"] == pytest.approx(math.log(4096), abs=0.15), name
    adam = [program["last_loss"] for name, program in programs.items() if name != "ours-sgd"]
    assert max(adam) - min(adam) < 0.25  # the same tokens, of other initial weights
    assert max(adam) < programs["ours-sgd"]["last_loss"] - 0.3
    results["presets"]["tiny"]["programs"]["ours"]["peak_memory_gib"] /= 4
    (tmp_path / "old.json").write_text(json.dumps(results))
    command += [
        "--output",
        str(tmp_path / "again"),
        "--against",
        "",
        "--compare",
        str(tmp_path / "old.json"),
        "--threshold",
        "0.99",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ours: REGRESSION" in done.stdout


@pytest.mark.matrix
def test_adapters_beside_the_trainer_with_peft(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "tiny-lora-mixed", "--platform", "cpu", "--steps", "2", "--warmup", "1"]
    command += ["--rounds", "1", "--against", "trainer,bare", "--output", str(tmp_path)]
    command += ["--fresh", "megatron_lm.train.learning-rate.lr=1e-2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    programs = json.loads((tmp_path / "compare.json").read_text())["presets"]["tiny-lora-mixed"]["programs"]
    assert list(programs) == ["ours", "trainer"]  # the bare loop has no adapters
    assert "peft, padding-free" in programs["trainer"]["notes"]
    for name, program in programs.items():
        assert program["first_loss"] == pytest.approx(math.log(4096), abs=0.15), name
        assert program["last_loss"] < program["first_loss"] - 0.1, name


@pytest.mark.matrix
@pytest.mark.parametrize("preset", ["tiny-deepseek", "tiny-gpt-oss", "tiny-qwen3.5"])
def test_experts_learn_like_those_of_transformers(preset: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), preset, "--platform", "cpu", "--steps", "3", "--warmup", "1"]
    command += ["--rounds", "1", "--against", "trainer", "megatron_lm.train.learning-rate.lr=1e-3"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    programs = json.loads((tmp_path / "compare.json").read_text())["presets"][preset]["programs"]
    assert list(programs) == ["ours", "trainer"]
    for name, program in programs.items():
        assert program["first_loss"] == pytest.approx(math.log(4096), abs=0.15), name
    assert programs["ours"]["last_loss"] == pytest.approx(programs["trainer"]["last_loss"], abs=0.1)
