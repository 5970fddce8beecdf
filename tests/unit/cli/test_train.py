"""What the end of a run prints; tests/end_to_end/test_after_a_run.py runs the commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_wrap.cli import train as module
from megatron_wrap.cli.main import parse
from megatron_wrap.cli.train import next_steps
from megatron_wrap.config import load_run_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
MOCK, SFT = str(CONFIGS / "tiny-llama-mock.yaml"), str(CONFIGS / "tiny-llama-sft.yaml")
TRAIN = "megatron_lm.train.common."


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Comment -> the words of each command below it, for a run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("GPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "find_checkpoint", lambda folder: 1)

    def show(config: str, *overrides: str, evaluates: bool = True) -> dict[str, list[str]]:
        text = next_steps(load_run_config(config, overrides), ["train", config, *overrides], evaluates)
        return {comment: shlex.split(command) for comment, command in re.findall(r"  # (.*)\n  (.*)", text)}

    return show


def only(commands: dict[str, list[str]], start: str) -> list[str]:
    (words,) = [words for comment, words in commands.items() if comment.startswith(start)]
    return words


def test_a_run_without_checkpoints_is_told_how_to_save_them(steps):
    commands = steps(MOCK, f"{TRAIN}train_iters=3")
    words = only(commands, "train again")
    assert words[-3:] == [MOCK, f"{TRAIN}train_iters=3", f"{TRAIN}save=outputs/tiny-llama-mock/checkpoints"]
    assert list(commands) == ["train again and save checkpoints"]  # and there is no metrics.jsonl


def test_the_longer_run_replaces_the_number_of_steps_and_takes_its_own_schedule(steps):
    override = "megatron_lm.train.optimizer.override_opt_param_scheduler=true"
    words = only(steps(SFT, f"{TRAIN}train_iters=7", f"{TRAIN}seed=5"), "resume up to step 14")
    assert words[-4:] == [SFT, f"{TRAIN}seed=5", f"{TRAIN}train_iters=14", override]
    _, args = parse(words[words.index("train") :])
    assert load_run_config(args.config, args.overrides).train.train_iters == 14
    again = only(steps(SFT, override), "resume up to step 400")
    assert again.count(override) == 1


def test_commands_that_the_run_has_no_use_for_are_left_out(steps):
    whole = steps(SFT)
    assert [len(words) > 0 for words in whole.values()] == [True] * 4
    assert only(whole, "export")[-2:] == ["outputs/tiny-llama-sft/checkpoints", "outputs/tiny-llama-sft/hf"]
    # a user's script, which may not evaluate; an architecture that no family of transformers can express
    commands = steps(SFT, "megatron_lm.model.arch.qk_layernorm=true", "megatron_lm.model.arch.norm_epsilon=1e-4",
                  "megatron_lm.model.arch.add_bias_linear=true", evaluates=False)  # fmt: skip
    assert [comment.split(",")[0] for comment in commands] == [
        "resume up to step 400",
        "let the model answer or complete what you type; Ctrl-D ends",
    ]


def test_what_comes_next_fits_the_model(steps):
    chat = only(steps(str(CONFIGS / "tiny-llama-dpo.yaml")), "let the model")
    assert parse(chat[chat.index("chat") :])[1].source == "outputs/tiny-llama-dpo/checkpoints"
    assert not [comment for comment in steps(str(CONFIGS / "tiny-llama-reward.yaml")) if "model answer" in comment]


def test_records_that_exist_are_named(steps):
    Path("outputs/tiny-llama-mock/tensorboard").mkdir(parents=True)
    Path("outputs/tiny-llama-mock/metrics.jsonl").write_text("")
    commands = steps(MOCK)
    assert only(commands, "the metrics")[-1] == "outputs/tiny-llama-mock/metrics.jsonl"
    assert not [comment for comment in commands if "curves" in comment]  # not of this run
    commands = steps(MOCK, "megatron_wrap.logger.enable_tensorboard=true")
    assert only(commands, "their curves")[-2:] == ["--logdir", "outputs/tiny-llama-mock/tensorboard"]


def test_the_environment_that_the_run_needed_is_repeated(steps, monkeypatch):
    monkeypatch.setenv("GPUS_PER_NODE", "2")
    monkeypatch.setenv("PYTHONPATH", "my flows")
    assert only(steps(SFT), "evaluate")[0] == "GPUS_PER_NODE=2"
    assert not [word for word in only(steps(SFT), "evaluate") if word.startswith("PYTHONPATH")]
    flow = "megatron_wrap.flow.flow_key=my_module:MyFlow"
    assert only(steps(SFT, flow), "evaluate")[:2] == ["GPUS_PER_NODE=2", "PYTHONPATH=my flows"]
    assert "GPUS_PER_NODE=2" not in only(steps(SFT), "export")
