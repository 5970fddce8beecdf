"""What a shell completes: commands, options and their values, files, overrides of a run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wrap.cli.completion import candidates
from megatron_wrap.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]
CONFIG = "configs/tiny-llama-sft.yaml"
TRAIN, FLOW = "megatron_lm.train", "megatron_wrap.flow"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], sorted([*COMMANDS, "--help", "--version"])),
        (["tra"], ["train", "train-tokenizer"]),
        (["none", ""], []),
        (["train", "--s"], ["--script"]),
        (["train", CONFIG, "--dr"], ["--dry-run"]),
        (["preprocess", "--text-unit", ""], ["file", "line", "paragraph"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["check", "conf"], ["configs/"]),
        (["check", "configs/tiny-llama-s"], [CONFIG]),
        (["train", "--script", "examples/tr"], ["examples/train.py"]),
        (["train", "mkdocs.y"], ["mkdocs.yml"]),
        (["train", "pyproj"], []),
        (["train", CONFIG, "meg"], ["megatron_lm.", "megatron_wrap."]),
        (["train", CONFIG, "--script", "x", f"{TRAIN}.c"], [f"{TRAIN}.common."]),
        (["train", CONFIG, f"{TRAIN}.common.global_batch_s"], [f"{TRAIN}.common.global_batch_size="]),
        (["explain", CONFIG, f"{TRAIN}.common.global_batch_s"], [f"{TRAIN}.common.global_batch_size"]),
        (["train", CONFIG, f"{FLOW}.loss_"], [f"{FLOW}.loss_on="]),  # a key of the flow that the run selects
        (["train", CONFIG, f"{FLOW}.packing="], [f"{FLOW}.packing=false", f"{FLOW}.packing=true"]),
        (
            ["train", CONFIG, f"{FLOW}.__select__=gpt_d"],
            [f"{FLOW}.__select__=gpt_distill", f"{FLOW}.__select__=gpt_dpo"],
        ),
        (
            ["train", CONFIG, "megatron_wrap.init.platform=c"],
            [f"megatron_wrap.init.platform={n}" for n in ("cpu", "cuda")],
        ),
        (["train", CONFIG, "megatron_wrap.profile.steps="], []),
    ],
)
def test_candidates(words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert candidates(words) == expected


def test_a_run_that_cannot_be_read_has_the_keys_of_the_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("megatron_lm: {nothing: 1}\n")
    assert candidates(["train", "run.yaml", f"{TRAIN}.common.train_it"]) == [f"{TRAIN}.common.train_iters="]


def test_file_names_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my run.yaml").touch()
    assert candidates(["train", "my"]) == ["'my run.yaml'"]


def test_every_command_completes_without_torch() -> None:
    """In a process of its own, because this one has torch."""
    program = (
        "import sys; from megatron_wrap.cli import completion, main\n"
        "for name in main.COMMANDS: completion.candidates([name, '--'])\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_of_a_shell_calls_this_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"megatron-wrap completion {shell} --line" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("megatron-wrap trai", "train train-tokenizer"),
        (f"megatron-wrap train {CONFIG} {FLOW}.packing=t", "true"),  # bash begins a word after =
    ],
)
def test_bash_completes(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    code = capsys.readouterr().out
    program = f"""megatron-wrap() {{ {sys.executable} -m megatron_wrap.cli.main "$@"; }}
{code}
COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _megatron_wrap 2>/dev/null; IFS=' '; echo "${{COMPREPLY[*]}}"
"""
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"
