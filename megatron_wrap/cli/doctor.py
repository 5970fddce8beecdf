"""`megatron-wrap doctor`: find problems of this machine, or of the nodes of a run, before the run starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.cli.check import report
from megatron_wrap.cli.launching import add_launch_arguments, launch_of, launcher_of, rendezvous_of
from megatron_wrap.config import RunConfig
from megatron_wrap.core.local_copies import with_local_copies
from megatron_wrap.core.validation.validations import Item
from megatron_wrap.errors import ConfigError, ProcessError
from megatron_wrap.launch.agent import launch_processes, python_call
from megatron_wrap.launch.doctor.checks import NodeAnswers, Subject, answers, merged
from megatron_wrap.launch.doctor.node import CHECKS
from megatron_wrap.launch.interface import Program, nodes_of
from megatron_wrap.parallel.watch.ending import record_end
from megatron_wrap.platform.base.machine import visible_gpus

_PROCESSES = 2
"""Number of processes of the all-reduce without a run and without GPUs."""
_MEETING_SECONDS = 60
"""Seconds to wait until the other nodes begin."""
_ERRORS = 2
"""Exit code of a process that has reported errors, the same as that of a user's error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML of the run (default: the machine alone)")
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b.c=value", help="overrides, applied last")
    parser.add_argument("--json", action="store_true", help="print a list of objects with status, name and text")
    add_launch_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each check; returns 1 if there are errors, else 0."""
    config = _read(arguments.config, arguments.overrides)
    if "RANK" in os.environ:  # torchrun runs this command in each process
        return _of_rank(config, arguments.json)
    launcher = arguments.launcher or ("local" if config is None else config.launch.launcher)
    words = (str(int(arguments.json)), arguments.config or "", *arguments.overrides)
    if launcher != "local":
        return _in_job(launcher, config, arguments, Program(words, function=run_process))
    default = None if config is not None else visible_gpus() or _PROCESSES
    nodes = nodes_of(config, arguments.gpus_per_node or default, arguments.nodes, rendezvous_of(arguments))
    failure = []
    if nodes.world_size > 1:
        try:
            program = [*python_call(run_process), *words]
            code = launch_processes(nodes, program, config, seconds_to_meet=_MEETING_SECONDS, own_exit_codes=False)
            if code in (0, _ERRORS):
                return int(code == _ERRORS)
            failure.append(Item("error", "processes", "a process has failed; its message is above"))
        except ProcessError as error:
            failure.append(Item("error", "processes", str(error)))
    subject = Subject(config, nodes.processes_per_node, nodes.world_size, nodes.num_nodes)
    return _printed([*merged([NodeAnswers("", answers(CHECKS, subject))]), *failure], arguments.json)


def _read(config: str | None, overrides: Sequence[str]) -> RunConfig | None:
    return with_local_copies(read_run(config, overrides)) if config else None


def _printed(items: Sequence[Item], as_json: bool) -> int:
    """Print the report; returns the exit code."""
    sys.stdout.write(f"{report(items, as_json)}\n")  # Ray prints a second time what is printed
    sys.stdout.flush()
    return _exit_code(items)


def _exit_code(items: Sequence[Item]) -> int:
    return int(any(item.status == "error" for item in items))


def _in_job(launcher: str, config: RunConfig | None, arguments: argparse.Namespace, program: Program) -> int:
    """Examine the nodes in a job of this launcher, and wait for its end."""
    if config is None:
        raise ConfigError(f"doctor --launcher {launcher} starts a job as a run does; name the CONFIG of one")
    command = ("doctor", arguments.config, *(["--json"] if arguments.json else []), *arguments.overrides)
    job = launcher_of(config, arguments).start(launch_of(config, arguments, command, program))
    if job.announcement:
        print(job.announcement, file=sys.stderr, flush=True)
    return int(job.wait().exit_code != 0)


def run_process(as_json: str, config: str, *overrides: str) -> None:
    """The work of one of the processes that this command or a job starts.

    Args:
        as_json: 1 or 0.
        config: path of the run's YAML; empty: none.
    """
    code = _of_rank(_read(config, overrides), as_json == "1")
    record_end(_ERRORS if code else 0)
    if code:
        sys.exit(_ERRORS)


def _of_rank(config: RunConfig | None, as_json: bool) -> int:
    """Print the report on global rank 0; returns the exit code, on the first process of each node, else 0."""
    from megatron_wrap.launch.doctor.between_processes import report_of_all

    items = report_of_all(config) or []
    return _printed(items, as_json) if os.environ["RANK"] == "0" else _exit_code(items)
