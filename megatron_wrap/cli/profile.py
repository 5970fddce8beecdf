"""`megatron-wrap profile`: run some steps, and show where their time goes and what to change."""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

from megatron_wrap.cli.arguments import add_run_arguments
from megatron_wrap.cli.launching import (
    add_launch_arguments,
    add_start_arguments,
    read_for_launch,
    shares_files,
    started,
)
from megatron_wrap.core.validation import validate
from megatron_wrap.errors import ConfigError
from megatron_wrap.launch.interface import Program

_NOTHING_SAVED = (
    *(f"megatron_lm.train.common.{key}=null" for key in ("save", "save_interval", "early_stop_patience")),
    *("megatron_wrap.checkpoint.keep=null", "megatron_wrap.checkpoint.best_metric=null"),
    "megatron_wrap.checkpoint.export_hf=false",
    "megatron_wrap.logger.tensorboard_dir=null",
    *(f"megatron_wrap.logger.{key}=false" for key in ("enable_wandb", "enable_tensorboard", "progress_bar")),
)
"""Overrides with which a run writes no checkpoints and does not resume."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_run_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, help="steps to profile (default: 3)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those (default: 5)")
    parser.add_argument("--output", metavar="FOLDER", help="folder to write (default: outputs/profile-NAME)")
    add_launch_arguments(parser)
    add_start_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Validates, starts the processes, and returns their exit code."""
    if arguments.steps < 1 or arguments.warmup < 1:
        raise ConfigError(f"--steps {arguments.steps}, --warmup {arguments.warmup}: both are at least 1")
    folder = arguments.output or f"outputs/profile-{Path(arguments.config).stem}"
    overrides = [*arguments.overrides, *overrides_of(arguments.steps, arguments.warmup, folder)]
    config = read_for_launch(arguments, overrides)
    output = ["--output", arguments.output] if arguments.output else []
    numbers = ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    command = ("profile", arguments.config, *numbers, *output, *arguments.overrides)
    program = Program((arguments.config, *overrides), function=run_rank)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library prints its start and end
    check = functools.partial(validate, config, has_files=shares_files(config, arguments))
    return started(config, arguments, command, program, check).exit_code


def overrides_of(steps: int, warmup: int, folder: str) -> list[str]:
    """Overrides with which a run profiles `steps` steps after `warmup` others, and writes only `folder`."""
    profiled = ",".join(str(iteration) for iteration in range(warmup + 1, warmup + 1 + steps))
    return [
        *_NOTHING_SAVED,
        f"megatron_wrap.logger.output_dir={folder}",
        f"megatron_wrap.profile.steps=[{profiled}]",
        f"megatron_wrap.profile.output_dir={folder}",
    ]


def run_rank(config: str, *overrides: str) -> None:
    """The work of one process."""
    from megatron_wrap.core import MegatronWrap, exit_on_user_error

    with exit_on_user_error(), MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        last = max(wrap.config.profile.steps)
        for batch in wrap.batches():
            wrap.train(batch)
            if wrap.iteration == last:
                break
