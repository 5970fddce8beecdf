"""`megatron-wrap train`: validate the configuration, then start processes that run examples/train.py or a user's
script."""

from __future__ import annotations

import argparse
import os

from megatron_wrap.cli.arguments import add_run_arguments
from megatron_wrap.cli.check import add_script_argument, check_of, report, script_of
from megatron_wrap.cli.launching import (
    add_launch_arguments,
    add_start_arguments,
    launch_of,
    launch_options,
    launcher_of,
    read_for_launch,
    shares_files,
    started,
)
from megatron_wrap.core.validation import validate
from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.launch.contract import LAUNCHED_BY, Program


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
    launch = launch_of(config, arguments, command, program)
    launcher = launcher_of(config, arguments)
    # the command that submitted a job of Slurm has validated the run, with the same files
    if not arguments.dry_run and os.environ.get(LAUNCHED_BY) != "slurm":
        validate(config, launcher.world_size(launch), own_script is not None, has_files)
    ended = started(launch, launcher, arguments)
    if ended.finished:
        from megatron_wrap.cli.next_steps import next_steps

        again = ["train", arguments.config, *script, *launch_options(arguments), *arguments.overrides]
        print(hide_secrets(next_steps(config, again, evaluates=own_script is None)))
    return ended.exit_code
