"""What a shell completes: commands, options and their values, files, overrides of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wrap.cli.completion import complete_override
from megatron_wrap.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]
CONFIG = "configs/tiny-llama-sft.yaml"
TRAIN, FLOW = "megatron_lm.train", "megatron_wrap.flow"


def completed(line: str, folder: Path = ROOT) -> str:
    """The candidates of bash for a line up to the cursor, and modules that a completion must not import."""
    program = (
        "import os, sys; from megatron_wrap.cli.main import main\n"
        "os._exit = lambda code: sys.exit(' '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
        "main([])"
    )
    variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "|", "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout"}
    line = f"megatron-wrap {line}"
    variables |= {"_ARGCOMPLETE_COMP_WORDBREAKS": " '\"=:", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "|".join(COMMANDS)),
        (f"train {CONFIG} --dr", "--dry-run"),
        ("preprocess --text-unit ", "file|paragraph|line"),
        ("check configs/tiny-llama-s", CONFIG),
        ("train --script examples/tr", "examples/train.py"),
        (f"train {CONFIG} --script x {TRAIN}.common.global_batch_s", f"{TRAIN}.common.global_batch_size="),
        (f"explain {CONFIG} {TRAIN}.common.global_batch_s", f"{TRAIN}.common.global_batch_size"),
        (f"train {CONFIG} {FLOW}.packing=t", "true"),  # bash begins a word after =
    ],
)
def test_a_shell_completes_without_torch(line: str, expected: str) -> None:
    assert completed(line) == expected


def test_file_names_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "my run.yaml").touch()
    assert completed("train my", tmp_path) == "my\\ run.yaml"


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("meg", ["megatron_lm.", "megatron_wrap."]),
        (f"{FLOW}.loss_", [f"{FLOW}.loss_on="]),  # a key of the flow that the run selects
        (f"{FLOW}.packing=", [f"{FLOW}.packing=false", f"{FLOW}.packing=true"]),
        (f"{FLOW}.__select__=gpt_d", [f"{FLOW}.__select__=gpt_distill", f"{FLOW}.__select__=gpt_dpo"]),
        ("megatron_wrap.init.platform=c", [f"megatron_wrap.init.platform={name}" for name in ("cpu", "cuda")]),
        ("megatron_wrap.profile.steps=", []),
    ],
)
def test_overrides(prefix: str, expected: list[str]) -> None:
    assert sorted(complete_override(prefix, str(ROOT / CONFIG))) == expected


def test_a_run_that_cannot_be_read_has_the_keys_of_the_sections(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("megatron_lm: {nothing: 1}\n")
    run = str(tmp_path / "run.yaml")
    assert complete_override(f"{TRAIN}.common.train_it", run) == [f"{TRAIN}.common.train_iters="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_of_a_shell_calls_this_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "megatron-wrap" in capsys.readouterr().out
