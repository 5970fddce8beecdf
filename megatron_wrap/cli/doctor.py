"""`megatron-wrap doctor`: what is wrong with this machine, or the nodes of a run, before time is spent on it."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.cli.check import report
from megatron_wrap.cli.launching import add_launch_arguments, launch_of, launcher_of, rendezvous_of
from megatron_wrap.config import RunConfig
from megatron_wrap.core.remote.local_copies import with_local_copies
from megatron_wrap.core.validation.validations import Item
from megatron_wrap.errors import ConfigError, ProcessError
from megatron_wrap.launch.agent import launch_processes, python_call
from megatron_wrap.launch.contract import Program
from megatron_wrap.launch.doctor.catalogue import CHECKS
from megatron_wrap.launch.doctor.checks import NodeAnswers, Subject, answers, merged
from megatron_wrap.launch.nodes import Nodes, nodes_of
from megatron_wrap.platform.base.machine import visible_gpus

_PROCESSES = 2
"""Of an all-reduce without a run and without GPUs."""
_MEETING_SECONDS = 60
"""For the other nodes to begin."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML of the run (default: the machine alone)")
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b.c=value", help="overrides, applied last")
    parser.add_argument("--json", action="store_true", help="print a list of objects with status, name and text")
    add_launch_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each check; returns 1 if there are errors, else 0."""
    config = None if arguments.config is None else _read(arguments.config, arguments.overrides)
    if "RANK" in os.environ:  # torchrun runs this command in each process
        return _of_rank(config, arguments.json)
    launcher = arguments.launcher or ("local" if config is None else config.launch.launcher)
    if launcher != "local":
        return _in_job(launcher, config, arguments)
    default = None if config is not None else visible_gpus() or _PROCESSES
    nodes = nodes_of(config, arguments.gpus_per_node or default, arguments.nodes, rendezvous_of(arguments))
    items = None if nodes.world_size == 1 else _of_processes(config, nodes, arguments)
    if items is None:
        return _printed(_of_this_node(config, nodes), arguments.json)
    if nodes.node_rank == 0 or items[-1].name == "processes":
        return _printed(items, arguments.json)
    print(f"node {nodes.node_rank} ({socket.gethostname()}) has answered; node 0 prints the report", file=sys.stderr)
    return _exit_code(items)


def _printed(items: Sequence[Item], as_json: bool) -> int:
    """Print the report; returns the exit code."""
    sys.stdout.write(f"{report(items, as_json)}\n")  # Ray prints a second time what is printed
    sys.stdout.flush()
    return _exit_code(items)


def _exit_code(items: Sequence[Item]) -> int:
    return int(any(item.status == "error" for item in items))


def _read(config: str, overrides: Sequence[str]) -> RunConfig:
    return with_local_copies(read_run(config, overrides))


# ---- with another launcher ----


def _in_job(launcher: str, config: RunConfig | None, arguments: argparse.Namespace) -> int:
    """Examine the nodes of a job of this launcher, and wait for its end."""
    if config is None:
        raise ConfigError(f"doctor --launcher {launcher} starts a job as a run does; name the CONFIG of one")
    json_words = ["--json"] if arguments.json else []
    words = (arguments.config, *arguments.overrides)
    command = ("doctor", arguments.config, *json_words, *arguments.overrides)
    program = Program((str(int(arguments.json)), *words), function=run_in_job)
    launch = launch_of(config, arguments, command, program)
    job = launcher_of(config, arguments).start(launch)
    if job.announcement:
        print(job.announcement, file=sys.stderr, flush=True)
    return job.wait().exit_code


def run_in_job(as_json: str, config: str, *overrides: str) -> None:
    """The work of one process of a job."""
    code = _of_rank(_read(config, overrides), as_json == "1")
    if code:
        sys.exit(code)


def _of_rank(config: RunConfig | None, as_json: bool) -> int:
    """The report and the exit code on global rank 0; 0 on the others."""
    from megatron_wrap.launch.doctor.ranks import report_of_all

    items = report_of_all(config)
    return _printed(items or [], as_json) if os.environ["RANK"] == "0" else 0


# ---- with processes of this command ----


def _of_this_node(config: RunConfig | None, nodes: Nodes) -> list[Item]:
    subject = Subject(config, nodes.processes_per_node, nodes.world_size, nodes.num_nodes)
    return merged([NodeAnswers("", answers(CHECKS, subject))])


def _of_processes(config: RunConfig | None, nodes: Nodes, arguments: argparse.Namespace) -> list[Item]:
    """Of all nodes, by the processes of this one, which meet the others; if they fail, of this node, and why."""
    reason = "a process has failed; its message is above"
    with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as folder:
        file = Path(folder, "report.json")
        program = [*python_call(run_rank), str(file), arguments.config or "", *arguments.overrides]
        try:
            launch_processes(nodes, program, config, seconds_to_meet=_MEETING_SECONDS)
        except ProcessError as error:
            reason = str(error)
        if file.exists():
            return [Item(*item) for item in json.loads(file.read_text(encoding="utf-8"))]
    return [*_of_this_node(config, nodes), Item("error", "processes", reason)]


def run_rank(file: str, config: str, *overrides: str) -> None:
    """The work of one of the processes that `run` starts.

    Args:
        file: that the first process of this node writes the report of all nodes to.
        config: path of the run's YAML; empty: none.
    """
    from megatron_wrap.launch.doctor.ranks import report_of_all

    items = report_of_all(_read(config, overrides) if config else None)
    if items is not None:
        Path(file).write_text(json.dumps(items), encoding="utf-8")
