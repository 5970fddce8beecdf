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
from megatron_wrap.errors import ConfigError, LayoutError
from megatron_wrap.launch.contract.launcher import Program
from megatron_wrap.launch.doctor.catalogue import CHECKS
from megatron_wrap.launch.doctor.checks import Answer, Subject, answers
from megatron_wrap.launch.doctor.nodes import NodeAnswers, merged
from megatron_wrap.launch.doctor.ports import reached
from megatron_wrap.launch.local.agent import launch_processes, python_call
from megatron_wrap.launch.local.launcher import subject_of
from megatron_wrap.launch.local.nodes import nodes_of
from megatron_wrap.platform.base.machine import visible_gpus

_PROCESSES = 2
"""Of an all-reduce without a run and without GPUs."""
_MEETING_SECONDS = 60.0
"""For the other nodes to begin."""
_ANSWERS, _REPORT = "answers.json", "report.json"
"""Files through which the command and the processes that it starts exchange their results."""


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
    items, prints = _of_node(config, arguments)
    return _printed(items, arguments.json) if prints else _exit_code(items)


def _printed(items: Sequence[Item], as_json: bool) -> int:
    """Print the report; returns the exit code."""
    sys.stdout.write(f"{report(items, as_json)}\n")  # Ray prints a second time what is printed
    sys.stdout.flush()
    return _exit_code(items)


def _exit_code(items: Sequence[Item]) -> int:
    return int(any(item.status == "error" for item in items))


def _of_rank(config: RunConfig | None, as_json: bool) -> int:
    """The report and the exit code on global rank 0; 0 on the others."""
    from megatron_wrap.launch.doctor.ranks import report_of_all

    items = report_of_all(config)
    return _printed(items or [], as_json) if os.environ["RANK"] == "0" else 0


def _in_job(launcher: str, config: RunConfig | None, arguments: argparse.Namespace) -> int:
    """Examine the nodes of a job of this launcher, and wait for its end."""
    here = merged([NodeAnswers("", answers(CHECKS[:1], Subject(launcher=launcher)))])
    if _exit_code(here):
        return _printed(here, arguments.json)
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


def _read(config: str, overrides: Sequence[str]) -> RunConfig:
    return with_local_copies(read_run(config, overrides))


def _of_node(config: RunConfig | None, arguments: argparse.Namespace) -> tuple[list[Item], bool]:
    """Of all nodes, after the processes of this one have met the others; and whether this node prints it."""
    default = None if config is not None else visible_gpus() or _PROCESSES
    nodes = nodes_of(config, arguments.gpus_per_node or default, arguments.nodes, rendezvous_of(arguments))
    subject = subject_of(config, nodes)
    results = answers(CHECKS, subject)
    name = f"node {nodes.node_rank} ({socket.gethostname()})"
    if nodes.world_size == 1:
        return merged([NodeAnswers(name, results)]), True
    if nodes.node_rank > 0:
        meeting = Answer("port", *reached(subject, _MEETING_SECONDS))
        if meeting.status == "error":
            return merged([NodeAnswers(name, [*results, meeting])]), True
    with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as folder:
        Path(folder, _ANSWERS).write_text(json.dumps(results), encoding="utf-8")
        program = [*python_call(run_rank), folder, arguments.config or "", *arguments.overrides]
        reason = "a process has failed; its message is above"
        try:
            launch_processes(nodes, program, config, seconds_to_meet=round(_MEETING_SECONDS))
        except (LayoutError, RuntimeError) as error:  # of torch, which waits for the other nodes
            reason = f"{' '.join(str(error).split())[:200]}; start the same command on all {nodes.num_nodes} nodes"
        try:
            items = [Item(*item) for item in json.loads(Path(folder, _REPORT).read_text(encoding="utf-8"))]
        except OSError:
            return [*merged([NodeAnswers(name, results)]), Item("error", "processes", reason)], True
    if nodes.node_rank > 0:
        print(f"{name} has answered; node 0 prints the report", file=sys.stderr)
    return items, nodes.node_rank == 0


def run_rank(folder: str, config: str, *overrides: str) -> None:
    """The work of one of the processes that `run` starts.

    Args:
        folder: with the answers of this node; its first process writes the report of all nodes there.
        config: path of the run's YAML; empty: none.
    """
    from megatron_wrap.launch.doctor.ranks import report_of_all

    here = [Answer(*answer) for answer in json.loads(Path(folder, _ANSWERS).read_text(encoding="utf-8"))]
    items = report_of_all(_read(config, overrides) if config else None, here)
    if items is not None:
        Path(folder, _REPORT).write_text(json.dumps(items), encoding="utf-8")
