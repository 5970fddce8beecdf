"""`megatron-wrap train`: validate the configuration, start processes that run examples/train.py or a user's script, and
suggest commands that evaluate, resume and export the run."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.checkpoint.saved_run import find_checkpoint
from megatron_wrap.cli.arguments import add_run_arguments
from megatron_wrap.cli.check import add_script_argument, check_of, report, script_of
from megatron_wrap.cli.launching import (
    add_launch_arguments,
    add_start_arguments,
    launch_options,
    read_for_launch,
    shares_files,
    started,
)
from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import output_dir, tensorboard_dir
from megatron_wrap.core.validation import validate
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.launch.interface import LAUNCHED_BY, Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_run_arguments(parser)
    add_script_argument(parser)
    add_launch_arguments(parser)
    add_start_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Validates, trains, and prints what to do next; returns the exit code of the run."""
    if arguments.dry_run:
        checked = check_of(arguments)
        print(report(checked.items))
        if checked.exit_code or checked.config is None:
            return checked.exit_code
        config = checked.config
    else:
        config = read_for_launch(arguments, arguments.overrides)
    has_files = shares_files(config, arguments)
    own_script = script_of(arguments, has_files)
    script = ["--script", own_script] if own_script else []
    command = ("train", arguments.config, *script, *arguments.overrides)
    program = Program((arguments.config, *arguments.overrides), own_script)
    # the command that submitted a job of Slurm has validated the run, with the same files
    is_checked = arguments.dry_run or os.environ.get(LAUNCHED_BY) == "slurm"

    def check(num_processes: int) -> None:
        if not is_checked:
            validate(config, num_processes, own_script is not None, has_files)

    ended = started(config, arguments, command, program, check)
    if ended.finished:
        again = ["train", arguments.config, *script, *launch_options(arguments), *arguments.overrides]
        print(hide_secrets(next_steps(config, again, evaluates=own_script is None)))
    return ended.exit_code


_TRAIN = "megatron_lm.train.common."
_UNITS = {"train_iters": "step", "train_samples": "sample", "train_epochs": "epoch"}
_LAUNCH_VARIABLES = ("GPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def next_steps(config: RunConfig, command: Sequence[str], evaluates: bool) -> str:
    """Commands for the run that has just ended, each below a comment; only those whose files exist.

    Args:
        config: the run.
        command: arguments of `megatron-wrap` that started it: train CONFIG, options, overrides.
        evaluates: whether the training script evaluates at the end, even if no steps are left.
    """
    lines = ["next:"]

    def add(comment: str, text: str) -> None:
        lines.extend([f"  # {comment}", f"  {text}"])

    checkpoints = config.train.save
    if checkpoints is None:
        save = f"{_TRAIN}save={os.path.join(output_dir(config), 'checkpoints')}"
        add("train again and save checkpoints", _train(config, [*command, save]))
    elif _succeeds(lambda: find_checkpoint(checkpoints)):
        if evaluates and derived.evaluation_set_names(config):
            add("evaluate the checkpoint: no steps are left, so nothing is trained", _train(config, command))
        key, last = _doubled(config)
        until = f"{_UNITS[key]} {last}" if isinstance(last, int) else f"{_UNITS[key]} {last:g}"
        longer = _longer(config, command, f"{_TRAIN}{key}=", last)
        add(f"resume up to {until}, on the schedule of the longer run", _train(config, longer))
        # the family does not depend on the size of the vocabulary
        if _succeeds(lambda: export_format(config, config.arch.vocab_size or 1)):
            folder = os.path.join(output_dir(config), "hf")
            merged = ["--merge"] if config.adapter.adapter_type != "none" else []
            add(
                "export to a Hugging Face folder",
                _shell("megatron-wrap", "export-hf", checkpoints, folder, *merged),
            )
        if config.data.tokenizer is not None and not derived.has_value_head(config):
            add(
                "let the model answer or complete what you type; Ctrl-D ends",
                _shell("megatron-wrap", "chat", checkpoints),
            )
    metrics, events = Path(output_dir(config), "metrics.jsonl"), tensorboard_dir(config)
    if metrics.is_file():
        add("the metrics of each step", _shell("tail", "-n", "3", str(metrics)))
        add("a page of the whole run", _shell("megatron-wrap", "report", output_dir(config)))
    if events is not None and Path(events).is_dir():
        add("their curves in TensorBoard", _shell("tensorboard", "--logdir", events))
    return "\n".join(lines)


def _doubled(config: RunConfig) -> tuple[str, float]:
    """(key, value) that doubles the length of the run."""
    train = config.train
    if train.train_epochs is not None:
        return "train_epochs", 2 * train.train_epochs
    if train.train_samples is not None:
        return "train_samples", 2 * train.train_samples
    return "train_iters", 2 * derived.train_iters(config)


def _longer(config: RunConfig, command: Sequence[str], key: str, length: float) -> list[str]:
    """The command for a longer run. A schedule of another length is refused unless one of two keys selects one."""
    words = [text for text in command if not text.startswith(key)]
    if derived.is_indexed(config.data) and config.data.index_samples is None:
        words.append(f"megatron_wrap.data.index_samples={derived.indexed_samples(config)}")  # the same order of windows
    words.append(f"{key}{length:g}" if isinstance(length, float) else f"{key}{length}")
    chosen = config.optimizer.override_opt_param_scheduler or config.optimizer.use_checkpoint_opt_param_scheduler
    return words if chosen else [*words, "megatron_lm.train.optimizer.override_opt_param_scheduler=true"]


def _train(config: RunConfig, command: Sequence[str]) -> str:
    """A shell command that starts processes as this run did."""
    names = () if LAUNCHED_BY in os.environ else _LAUNCH_VARIABLES  # a job sets them itself
    names = (*names, "PYTHONPATH") if ":" in config.flow.flow_key else names
    variables = [f"{name}={shlex.quote(os.environ[name])}" for name in names if os.environ.get(name)]
    return " ".join([*variables, _shell("megatron-wrap", *command)])


def _shell(program: str, *arguments: str) -> str:
    """A shell command that starts a program of this environment, by its name if the shell finds it, else by its
    path."""
    script, on_path = Path(sys.executable).parent / program, shutil.which(program)
    if script.is_file() and not (on_path and Path(on_path).parent.samefile(script.parent)):
        relative = os.path.relpath(script)
        start = [str(script) if relative.startswith("..") else relative]
    elif program == "megatron-wrap" and not on_path:
        start = [sys.executable, "-m", "megatron_wrap.cli.main"]
    else:
        start = [program]
    return shlex.join([*start, *arguments])


def _succeeds(lookup: Callable[[], object]) -> bool:
    """Whether a lookup finds something."""
    with suppress(MegatronWrapError):
        return lookup() is not None
    return False
