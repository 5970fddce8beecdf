"""`megatron-wrap check`: everything that `megatron-wrap train` validates before its first step, in one report."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_wrap.cli.arguments import add_run_arguments
from megatron_wrap.cli.launching import add_launch_arguments, counted_processes, read_for_launch, shares_files
from megatron_wrap.config import RunConfig
from megatron_wrap.core.validation.candidate import Candidate
from megatron_wrap.core.validation.validations import Item, check, errors_of
from megatron_wrap.errors import ConfigError, MegatronWrapError
from megatron_wrap.metrics.number_format import counted


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    items: Sequence[Item]
    config: RunConfig | None = None
    """The run's configuration; None: it cannot be read."""

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 2 with errors, else 0."""
        return 2 if _count(self.items, "error") else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_run_arguments(parser)
    add_script_argument(parser)
    parser.add_argument("--json", action="store_true", help="print a list of objects with status, name and text")
    add_launch_arguments(parser)


def add_script_argument(parser: argparse.ArgumentParser) -> None:
    """Declares --script."""
    parser.add_argument("--script", metavar="FILE", help="training script to run instead of examples/train.py")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each item and a summary; returns 2 if there are errors, else 0."""
    checked = check_of(arguments)
    print(report(checked.items, arguments.json))
    return checked.exit_code


def script_of(arguments: argparse.Namespace, has_files: bool = True) -> str | None:
    """The value of --script.

    Args:
        has_files: whether the processes see the files of this machine.

    Raises:
        ConfigError: there is no such file.
    """
    if has_files and arguments.script and not Path(arguments.script).is_file():
        raise ConfigError(f"--script {arguments.script}: no such file")
    return arguments.script or None


def check_of(arguments: argparse.Namespace) -> Checked:
    """Checks the run that the arguments of `megatron-wrap train` describe.

    Raises:
        MegatronWrapError: an option or a variable of the environment is wrong.
    """
    try:
        config = read_for_launch(arguments, arguments.overrides)
    except MegatronWrapError as error:
        return Checked([*errors_of("configuration", error), Item("not checked", "all else", "needs configuration")])
    has_files = shares_files(config, arguments)
    own_script = script_of(arguments, has_files)
    processes = counted_processes(config, arguments)
    with warnings.catch_warnings():
        if config.logger.ignore_warning:
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
        elsewhere = (arguments.launcher or config.launch.launcher) != "local"
        candidate = Candidate(config, processes, own_script is not None, has_files, elsewhere)
        return Checked(check(candidate), config)


def report(items: Sequence[Item], as_json: bool = False) -> str:
    """The report as text: a line for each item, and the number of errors and warnings; or as a JSON list of objects."""
    if as_json:
        return json.dumps([item._asdict() for item in items], indent=1, ensure_ascii=False)
    width = max(len(item.name) for item in items)
    lines = [f"{item.status:<11}  {item.name:<{width}}  {item.text}" for item in items]
    errors, notes = _count(items, "error"), _count(items, "warning")
    summary = counted(errors, "error") if errors else "no errors"
    return "\n".join([*lines, f"{summary}, {counted(notes, 'warning')}" if notes else summary])


def _count(items: Sequence[Item], status: str) -> int:
    return sum(item.status == status for item in items)
