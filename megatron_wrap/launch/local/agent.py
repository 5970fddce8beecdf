"""Runs the processes of this node under torchrun's agent, and reports the one that failed first."""

from __future__ import annotations

import logging
import math
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.errors import ProcessError
from megatron_wrap.launch.local.nodes import Nodes
from megatron_wrap.launch.local.rendezvous import BACKEND, register_rendezvous
from megatron_wrap.launch.local.signals import AGENT_SIGNALS, LauncherSignals, exit_code_of
from megatron_wrap.launch.watch.process_watch import FAILURE, ProcessWatch
from megatron_wrap.parallel import rank_log
from megatron_wrap.parallel.watch import flight_recorder
from megatron_wrap.parallel.watch.interrupts import INTERRUPTED, RESUME
from megatron_wrap.platform.base.machine import this_machine

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

_INTERRUPTIBLE = """
import signal, sys
try:
    {statement}
except KeyboardInterrupt:  # in the imports; later ones are reported with the run's iteration
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(130)
"""


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
    nodes: Nodes,
    program: Sequence[str],
    config: RunConfig | None,
    signals: LauncherSignals | None = None,
    seconds_to_meet: int | None = None,
) -> int:
    """Runs the processes of this node under torchrun's agent; returns the exit code of the first one that failed.

    Those of a run on one node listen on the loopback interface only.

    Args:
        program: arguments of python in each process.
        config: of the run; None: there is none.
        signals: entered; what a signal does. None: it ends the processes at once.
        seconds_to_meet: that node 0 waits for the others, at most; None: torch's 10 minutes.

    Raises:
        RuntimeError: the nodes have not met.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # the agent logs every failed process; one report is enough, and a process reports a user's error itself
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nodes.processes_per_node)))
    if config is not None:
        machine = this_machine(config.init.platform)
        os.environ[CONNECTIONS] = str(cuda_connections(config, machine, os.environ.get(CONNECTIONS)).value)
    launch = _torchrun(nodes, seconds_to_meet)
    if signals is not None and "signals_to_handle" in {field.name for field in fields(launch)}:  # torch 2.10
        launch = replace(launch, signals_to_handle=AGENT_SIGNALS)
    watch = None if signals is None or config is None else _watch(signals, nodes, config)
    logs = None if signals is None or config is None else Path(output_dir(config), "logs")
    try:
        with ExitStack() as written:
            if signals is not None:
                written.enter_context(flight_recorder.written_into(signals.folder))
            if logs is not None:
                written.enter_context(rank_log.written_into(logs))
            elastic_launch(launch, sys.executable)("-u", *program)
    except ChildFailedError as failed:
        return _report(failed, watch, logs)
    except RendezvousError as error:
        raise ProcessError(
            f"{nodes.num_nodes} nodes do not find each other at {launch.rdzv_endpoint}: {error.__cause__ or error}; "
            "start the run on all of them within 10 minutes, and let them reach that port"
        ) from error
    except SignalException as signal:
        return 128 + signal.sigval if signals is None else exit_code_of(signal.sigval)
    finally:
        if watch is not None:
            watch.close()
    return 0


def _torchrun(nodes: Nodes, seconds_to_meet: int | None) -> LaunchConfig:
    """Options of torchrun; those of one node register a rendezvous on the loopback interface."""
    from torch.distributed.launcher.api import LaunchConfig

    from megatron_wrap.parallel import loopback

    local = nodes.num_nodes == 1
    if local:
        loopback.register_rendezvous()
        loopback.prefer_loopback()
    address, port = (
        (loopback.ADDRESS, nodes.master_port) if local else (nodes.master_address, nodes.master_port or 29500)
    )
    backend, meeting = loopback.BACKEND if local else "static", {} if local else {"rank": nodes.node_rank}
    if nodes.rendezvous_id is not None and not local:
        register_rendezvous()
        backend = BACKEND
    if seconds_to_meet is not None:
        meeting["join_timeout" if backend == BACKEND else "timeout"] = seconds_to_meet
    return LaunchConfig(
        min_nodes=nodes.num_nodes,
        max_nodes=nodes.num_nodes,
        nproc_per_node=nodes.processes_per_node,
        run_id=uuid.uuid4().hex if local else nodes.rendezvous_id or "megatron-wrap",
        rdzv_backend=backend,
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs=meeting,
        max_restarts=0,
        monitor_interval=0.2,
    )


def _watch(signals: LauncherSignals, nodes: Nodes, config: RunConfig) -> ProcessWatch:
    first = nodes.node_rank * nodes.processes_per_node
    report = Path(output_dir(config), FAILURE if nodes.node_rank == 0 else f"node{nodes.node_rank}_{FAILURE}")
    ranks = range(first, first + nodes.processes_per_node)
    return ProcessWatch(signals.folder, ranks, report, config.init.stopped_process_seconds, nodes.num_nodes == 1)


def _report(failed: ChildFailedError, watch: ProcessWatch | None, logs: Path | None) -> int:
    """Prints the last lines of the process that failed first, and which one it was; returns the exit code of the
    command."""
    codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    for code in (INTERRUPTED, RESUME):  # a request, which rank 0 has reported; others may have been terminated
        if code in codes.values():
            return code
    rank, failure = _first_failure(failed)
    if failure.exitcode == 2:  # a user's error, which the process has reported
        return 2
    sentence = f"rank {rank} ended with exit code {failure.exitcode}"
    if watch is not None:
        errors = {of: _recorded(each.message) for of, each in failed.failures.items() if each.error_file_data}
        sentence = watch.failed(
            codes, rank, errors.get(rank, ("", ""))[0], {of: text for of, (_, text) in errors.items()}
        )
    if logs is not None and rank != 0:  # the console has those of rank 0
        sys.stderr.write(rank_log.summary(logs, rank))
    where = "messages of the processes are above" if logs is None else f"{logs} has the messages of each rank"
    sys.stderr.write(f"error: {sentence}; {where}\n")
    return failure.exitcode if 0 < failure.exitcode < 256 else 1


def _first_failure(failed: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Torchrun's first failure; of those in the same second the one whose error was recorded first."""
    from megatron_wrap.parallel.launch import RECORDED_AT

    first = failed.get_first_failure()

    def recorded_at(failure: ProcessFailure) -> float:
        facts: dict[str, Any] = failure.message.get("extraInfo", {}) if isinstance(failure.message, dict) else {}
        return float(facts.get(RECORDED_AT, math.inf))

    same_second = [item for item in failed.failures.items() if item[1].timestamp == first[1].timestamp]
    return min([first, *same_second], key=lambda item: recorded_at(item[1]))


def _recorded(message: Any) -> tuple[str, str]:
    """The error and its traceback that a process has recorded for torchrun's agent (parallel/launch.py)."""
    if not isinstance(message, dict):
        return str(message), ""
    text, traceback = str(message.get("message", "")), str(message.get("extraInfo", {}).get("py_callstack", ""))
    return text, "" if traceback == text else traceback
