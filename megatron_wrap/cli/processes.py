"""The processes of a run on this node, under torchrun's agent."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.cli.arguments import count
from megatron_wrap.cli.launcher_signals import AGENT_SIGNALS, LauncherSignals, exit_code_of
from megatron_wrap.cli.process_watch import FAILURE, ProcessWatch
from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.schema.derived import output_dir, processes_needed
from megatron_wrap.errors import LayoutError
from megatron_wrap.parallel.interrupts import INTERRUPTED, RESUME
from megatron_wrap.platform.base.machine import visible_gpus

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_INTERRUPTIBLE = """
import signal, sys
try:
    {statement}
except KeyboardInterrupt:  # in the imports; later ones are reported with the run's iteration
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(130)
"""


@dataclass(frozen=True)
class Nodes:
    """Where the processes run, from the environment variables in the help text."""

    processes_per_node: int
    num_nodes: int
    node_rank: int
    master_address: str
    master_port: int

    @property
    def world_size(self) -> int:
        """Processes of the whole run."""
        return self.processes_per_node * self.num_nodes


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --nproc-per-node, and describes the environment variables."""
    parser.add_argument(
        "--nproc-per-node",
        type=count,
        metavar="N",
        help="processes on this node (default: one per GPU; without GPUs as many as the layout needs)",
    )
    parser.add_argument_group(
        "environment",
        "GPUS_PER_NODE  the same as --nproc-per-node, which precedes it\n"
        "NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT  of a run on several nodes, as for torchrun",
    )


def nodes_of(config: RunConfig, processes_per_node: int | None = None, starts: bool = True) -> Nodes:
    """Where the processes of a run are started, from the environment.

    Args:
        processes_per_node: of the command line; None: those of the environment, else as many as fit.
        starts: they will be started; False: they are only counted.

    Raises:
        LayoutError: a variable is missing or no whole number.
    """
    num_nodes = _integer("NNODES", 1)
    gpus = visible_gpus() if config.init.platform != "cpu" else 0
    if starts and num_nodes > 1 and "MASTER_ADDR" not in os.environ:
        raise LayoutError("NNODES is more than 1: set MASTER_ADDR (and MASTER_PORT) to those of node 0")
    default = gpus or -(-processes_needed(config) // num_nodes)
    return Nodes(
        processes_per_node=processes_per_node or _integer("GPUS_PER_NODE", default),
        num_nodes=num_nodes,
        node_rank=_integer("NODE_RANK", 0),
        master_address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_integer("MASTER_PORT", 0),
    )


def _integer(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdigit() or (variable in ("GPUS_PER_NODE", "NNODES") and int(text) < 1):
        raise LayoutError(f"environment variable {variable} is {text!r}; it must be a whole number")
    return int(text)


def python_statement(statement: str) -> list[str]:
    """Arguments of python that execute a statement; Ctrl-C in its imports prints no traceback."""
    return ["-c", _INTERRUPTIBLE.format(statement=statement)]


def python_call(function: Callable[..., None], *functions: Callable[..., None]) -> list[str]:
    """Arguments of python that call a function with other functions, and then the words that follow these arguments;
    each is imported from its module."""
    imports = "; ".join(f"from {each.__module__} import {each.__name__}" for each in (function, *functions))
    names = [each.__name__ for each in functions]
    return python_statement(f"import sys; {imports}; {function.__name__}({', '.join([*names, '*sys.argv[1:]'])})")


def launch_processes(
    nodes: Nodes, program: Sequence[str], config: RunConfig, signals: LauncherSignals | None = None
) -> int:
    """Runs the processes of this node under torchrun's agent; returns the exit code of the first one that failed.

    Those of a run on one node listen on the loopback interface only.

    Args:
        program: arguments of python in each process.
        config: of the run.
        signals: entered; what a signal does. None: it ends the processes at once.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from megatron_wrap.parallel import loopback

    # the agent logs every failed process; one report is enough, and a process reports a user's error itself
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nodes.processes_per_node)))
    os.environ[CONNECTIONS] = str(cuda_connections(config, os.environ.get(CONNECTIONS)).value)
    local = nodes.num_nodes == 1
    if local:
        loopback.register_rendezvous()
        loopback.prefer_loopback()
    address, port = (
        (loopback.ADDRESS, nodes.master_port) if local else (nodes.master_address, nodes.master_port or 29500)
    )
    launch = LaunchConfig(
        min_nodes=nodes.num_nodes,
        max_nodes=nodes.num_nodes,
        nproc_per_node=nodes.processes_per_node,
        run_id=uuid.uuid4().hex if local else "megatron-wrap",
        rdzv_backend=loopback.BACKEND if local else "static",
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs={} if local else {"rank": nodes.node_rank},
        max_restarts=0,
        monitor_interval=0.2,
    )
    if signals is not None and "signals_to_handle" in {field.name for field in fields(launch)}:  # torch 2.10
        launch = replace(launch, signals_to_handle=AGENT_SIGNALS)
    watch = None if signals is None else _watch(signals, nodes, config)
    try:
        elastic_launch(launch, sys.executable)("-u", *program)
    except ChildFailedError as failed:
        return _report(failed, watch)
    except SignalException as signal:
        return 128 + signal.sigval if signals is None else exit_code_of(signal.sigval)
    finally:
        if watch is not None:
            watch.close()
    return 0


def _watch(signals: LauncherSignals, nodes: Nodes, config: RunConfig) -> ProcessWatch:
    first = nodes.node_rank * nodes.processes_per_node
    report = Path(output_dir(config), FAILURE if nodes.node_rank == 0 else f"node{nodes.node_rank}_{FAILURE}")
    ranks = range(first, first + nodes.processes_per_node)
    return ProcessWatch(signals.folder, ranks, report, config.init.stopped_process_seconds)


def _report(failed: ChildFailedError, watch: ProcessWatch | None) -> int:
    """Prints which process failed first; returns the exit code of the command."""
    codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    for code in (INTERRUPTED, RESUME):  # a request, which rank 0 has reported; others may have been terminated
        if code in codes.values():
            return code
    rank, failure = failed.get_first_failure()
    if failure.exitcode == 2:  # a user's error, which the process has reported
        return 2
    sentence = f"rank {rank} ended with exit code {failure.exitcode}"
    if watch is not None:
        sentence = watch.failed(codes, rank, *(_recorded(failure.message) if failure.error_file_data else ("", "")))
    print(f"error: {sentence}; messages of the processes are above", file=sys.stderr)
    return failure.exitcode if 0 < failure.exitcode < 256 else 1


def _recorded(message: Any) -> tuple[str, str]:
    """The error and its traceback that a process has recorded for torchrun's agent (parallel/launch.py)."""
    if not isinstance(message, dict):
        return str(message), ""
    text, traceback = str(message.get("message", "")), str(message.get("extraInfo", {}).get("py_callstack", ""))
    return text, "" if traceback == text else traceback
