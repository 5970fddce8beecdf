"""The command line itself: its order, its errors, its help texts and the examples in them."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from megatron_wrap.cli.main import COMMANDS, main, parse
from megatron_wrap.config import load_run_config

ROOT = Path(__file__).resolve().parents[3]
CONFIG = "configs/tiny-llama-mock.yaml"
LR = "megatron_lm.train.learning-rate.lr"


def test_overrides_may_stand_after_an_option(capsys):
    assert main(["explain", CONFIG, LR, f"{LR}=0.25"]) == 0
    assert "0.25" in capsys.readouterr().out
    assert main(["train", "--script", "none.py", "no.yaml", "a=1"]) == 2
    assert main(["train", "no.yaml", "--script", "none.py", "a=1"]) == 2
    assert capsys.readouterr().err == "error: no.yaml: no such file\n" * 2


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "only_here.py").write_text("from megatron_wrap.flow.sft import MegatronWrapGPTModelSFTFlow as Mine\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    overrides = ["megatron_wrap.flow.__select__=custom", "megatron_wrap.flow.flow_key=only_here:Mine"]
    monkeypatch.chdir(tmp_path)
    assert main(["inspect-data", str(ROOT / CONFIG), *overrides]) == 2
    assert "only_here" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "there is no command trian; did you mean train?\n"),
        (["xyz"], "there is no command xyz; the commands are train, check, "),
        (["--nothing", "train"], "unrecognized arguments: --nothing train"),
        (["check-parity"], "the following arguments are required: CONFIG\n"),
        (["verify-hf"], "the following arguments are required: FOLDER\n"),
        (["explain", CONFIG, "--verbose"], "unrecognized arguments: --verbose\n"),
        (["train", CONFIG, "--scrpt", "x.py"], "unrecognized arguments: --scrpt x.py; did you mean --script?\n"),
        (["check", CONFIG, "--nproc_per_nod=2"], "--nproc_per_nod=2; did you mean --nproc-per-node?\n"),
        (["train", CONFIG, "--learning_rate", "1"], f"; transformers' learning_rate is {LR} here\n"),
        (["train", CONFIG, f"--{LR}=1"], f"; an override has no dashes: {LR}=1\n"),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_arguments_the_help_is_printed(capsys, help_of):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().out == help_of()


@pytest.fixture
def help_of(capsys):
    """The help text of a command; of no command that of megatron-wrap."""

    def show(*command: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return show


def examples(text: str) -> list[list[str]]:
    """The arguments of each example in a help text."""
    lines = re.findall(r"^  megatron-wrap (.+)$", text, re.M)
    assert len(lines) == text.count("\n  # ") >= 2  # each below a comment
    return [shlex.split(line) for line in lines]


def test_help_names_every_command_with_its_purpose(help_of):
    shown = help_of()
    assert shown.splitlines()[0].endswith("COMMAND ...")
    for name, purpose in COMMANDS.items():
        assert re.search(rf"^  {name} +{purpose}$", shown, re.M)
    for arguments in examples(shown):
        parse(arguments)


def test_the_page_of_the_command_line_has_every_command():
    page = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    listed = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    assert set(COMMANDS) <= {name for cell in listed for name in re.findall(r"`([\w-]+)`", cell)}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_command_run_in_a_checkout(name, help_of):
    for arguments in examples(help_of(name)):
        module, args = parse(arguments)
        assert module.__name__ == f"megatron_wrap.cli.{name.replace('-', '_')}"
        words = [*getattr(args, "rest", []), *getattr(args, "overrides", [])]
        configs = [word for word in arguments if word.startswith("configs/")]
        for config in configs:
            load_run_config(ROOT / config, [word for word in words if "=" in word])
        without = (
            *("schema", "new-flow", "chat", "eval", "export-hf", "verify-hf", "preprocess", "train-tokenizer"),
            *("report", "checkpoints", "completion", "doctor", "families", "jobs"),
        )
        assert configs or name in without
        assert not getattr(args, "script", None) or (ROOT / args.script).is_file()


def test_the_examples_of_explain_and_new_flow_run(help_of, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for arguments in examples(help_of("explain")):
        assert main(arguments) == 0
        assert capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    for arguments in examples(help_of("new-flow")):
        assert main(arguments) == 0
