"""The command line itself: what may stand where, and what is said of what may not."""

import pytest

from megatron_wrap.cli.main import COMMANDS, main

CONFIG = "configs/tiny-llama-mock.yaml"
LR = "megatron_lm.train.learning-rate.lr"


def test_overrides_may_stand_after_an_option(capsys):
    assert main(["explain", CONFIG, LR, f"{LR}=0.25"]) == 0
    assert "0.25" in capsys.readouterr().out
    assert main(["train", "--script", "none.py", "no.yaml", "a=1"]) == 2
    assert main(["train", "no.yaml", "--script", "none.py", "a=1"]) == 2
    assert capsys.readouterr().err == "error: no.yaml: no such file\n" * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["tune"], "invalid choice: 'tune'"),
        (["check-parity"], "the following arguments are required: config\n"),
        (["verify-hf"], "the following arguments are required: FOLDER\n"),
        (["explain", CONFIG, "--verbose"], "unrecognized arguments: --verbose"),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
