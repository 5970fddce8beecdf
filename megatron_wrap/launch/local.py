"""`--launcher local`: the processes of a run on this node, under torchrun's agent."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.schema.derived import output_dir, processes_needed
from megatron_wrap.errors import LayoutError, ProcessError
from megatron_wrap.launch.doctor.catalogue import quick_answers
from megatron_wrap.launch.doctor.checks import Subject
from megatron_wrap.launch.launcher import Ended, Launch, Program, Rendezvous
from megatron_wrap.launch.launcher_signals import AGENT_SIGNALS, LauncherSignals, exit_code_of
from megatron_wrap.launch.process_watch import FAILURE, ProcessWatch
from megatron_wrap.launch.rendezvous import BACKEND, register_rendezvous
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.parallel import flight_recorder, rank_log
from megatron_wrap.parallel.interrupts import INTERRUPTED, RESUME
from megatron_wrap.platform.base.machine import visible_gpus

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


_RUN_FILE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Runs a file with the working directory on sys.path, as `python -m` does, so that it may contain my_module:MyFlow."""


@dataclass(frozen=True)
class Nodes:
    """Where the processes run, from the command line, torchrun's variables and the configuration."""

    processes_per_node: int
    num_nodes: int
    node_rank: int
    master_address: str
    master_port: int
    rendezvous_id: str | None = None
    """The nodes find each other by torchrun's rendezvous c10d at the address, under this name; None: the first node
    listens there, and each knows its number."""

    @property
    def world_size(self) -> int:
        """Processes of the whole run."""
        return self.processes_per_node * self.num_nodes


def nodes_of(
    config: RunConfig | None,
    processes_per_node: int | None = None,
    num_nodes: int | None = None,
    rendezvous: Rendezvous | None = None,
    *,
    starts: bool = True,
) -> Nodes:
    """Where the processes of a run are started, by the command line, else the environment, else the configuration.

    Args:
        config: of the run; None: there is none, and a GPU or one process on each node by default.
        processes_per_node, num_nodes, rendezvous: of the command line.
        starts: they will be started; False: they are only counted.

    Raises:
        LayoutError: a variable is missing or no whole number.
    """
    num_nodes = num_nodes or _integer("NNODES", (config and config.launch.nodes) or 1)
    gpus = visible_gpus() if config is None or config.init.platform != "cpu" else 0
    fewest = 1 if config is None else -(-processes_needed(config) // num_nodes)
    default = (config and config.launch.gpus_per_node) or gpus or fewest
    address, port = _variable("MASTER_ADDR"), _integer("MASTER_PORT", 0)
    if rendezvous is not None:
        address, port = rendezvous.address()
    # as for torchrun, node 0 needs no number where it names its own address
    if starts and num_nodes > 1 and (not address or (rendezvous is not None and not _variable("NODE_RANK"))):
        raise LayoutError(
            f"the run has {num_nodes} nodes; on each, set MASTER_ADDR (and MASTER_PORT) to those of node 0, or give "
            "--rdzv-endpoint HOST:PORT, and set NODE_RANK to the number of the node"
        )
    return Nodes(
        processes_per_node=processes_per_node or _integer("GPUS_PER_NODE", default),
        num_nodes=num_nodes,
        node_rank=_integer("NODE_RANK", 0),
        master_address=address or "127.0.0.1",
        master_port=port,
        rendezvous_id=None if rendezvous is None else rendezvous.id,
    )


_PREFIXED = {"GPUS_PER_NODE": "PET_NPROC_PER_NODE"}
"""Names of torchrun's own variables; those of the others are PET_NNODES, PET_NODE_RANK, ..."""


def _variable(name: str) -> str:
    """The value of a variable or of torchrun's own one, which Kubeflow Trainer sets in pods; empty: neither is set."""
    return os.environ.get(name) or os.environ.get(_PREFIXED.get(name, f"PET_{name}"), "")


def subject_of(config: RunConfig | None, nodes: Nodes) -> Subject:
    """What `megatron-wrap doctor` examines on this node."""
    return Subject(
        config,
        nodes.processes_per_node,
        nodes.world_size,
        nodes.num_nodes,
        nodes.node_rank,
        nodes.master_address,
        nodes.master_port,
    )


def warn_about_node(config: RunConfig, nodes: Nodes) -> None:
    """Print the warnings about this node, before a run is started on it.

    Raises:
        PlatformError: the run cannot succeed here.
    """
    for warning in quick_answers(subject_of(config, nodes)):
        sys.stderr.write(f"warning: {warning.name}: {warning.text}\n")


def _integer(variable: str, default: int) -> int:
    text = _variable(variable)
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


class LocalLauncher:
    """Torchrun's agent on this node; on several, one of the agents that find each other by torchrun's variables."""

    def world_size(self, launch: Launch) -> int:
        """See `Launcher`."""
        return _nodes(launch).world_size

    def preview(self, launch: Launch) -> str:
        """The command of torchrun that starts the same processes."""
        nodes, program = _nodes(launch), launch.program
        where = ["--standalone"]
        if nodes.num_nodes > 1:
            address = f"--master-addr {nodes.master_address} --master-port {nodes.master_port or 29500}"
            if nodes.rendezvous_id is not None:
                address = f"--rdzv-backend c10d --rdzv-endpoint {nodes.master_address}:{nodes.master_port}"
                address += f" --rdzv-id {nodes.rendezvous_id}"
            where = [f"--nnodes {nodes.num_nodes} --node-rank {nodes.node_rank} {address}"]
        if program.function is not None:
            processes = counted(nodes.processes_per_node, "process")
            return f"megatron-wrap {shlex.join(launch.command)}, in {processes} on this node"
        words = shlex.join([program.script or str(_default_script()), *program.words])
        return " ".join(["torchrun", *where, f"--nproc-per-node {nodes.processes_per_node}", words])

    def start(self, launch: Launch) -> LocalJob:
        """See `Launcher`; prints warnings about this node.

        Raises:
            PlatformError: the run cannot succeed on this node.
        """
        warn_about_node(launch.config, _nodes(launch))
        return LocalJob(launch)


class LocalJob:
    """A run of which this process is torchrun's agent."""

    announcement = ""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def wait(self) -> Ended:
        """See `Job`."""
        config, nodes = self._launch.config, _nodes(self._launch)
        program = _python_arguments(self._launch.program)
        if not self._launch.saves_on_signals:
            exit_code = launch_processes(nodes, program, config)
            return Ended(exit_code, exit_code == 0 and nodes.node_rank == 0)
        with LauncherSignals(config.train.stop_within_seconds) as signals:
            exit_code = launch_processes(nodes, program, config, signals)
            return Ended(exit_code, exit_code == 0 and not signals.stopped and nodes.node_rank == 0)


def _nodes(launch: Launch) -> Nodes:
    return nodes_of(launch.config, launch.processes_per_node, launch.num_nodes, launch.rendezvous)


def _python_arguments(program: Program) -> list[str]:
    if program.function is not None:
        return [*python_call(program.function), *program.words]
    if program.script is not None:
        return [program.script, *program.words]
    return [*python_statement(_RUN_FILE), str(_default_script()), *program.words]


def _default_script() -> Path:
    """examples/train.py of the installed package; in a checkout, the file next to the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "examples" / "train.py"
    return installed if installed.is_file() else package.parent / "examples" / "train.py"


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
        os.environ[CONNECTIONS] = str(cuda_connections(config, os.environ.get(CONNECTIONS)).value)
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
