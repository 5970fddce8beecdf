"""Runs the processes of this node under torchrun's agent, and reports the one that failed first, or left the run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.errors import ProcessError
from megatron_wrap.launch.nodes import MEETING_PORT, Nodes
from megatron_wrap.launch.signals import AGENT_SIGNALS, LauncherSignals, exit_code_of
from megatron_wrap.launch.watch.process_watch import FAILURE, ProcessWatch, cause_of
from megatron_wrap.launch.watch.records import ENDS, Ending, ProcessRecords
from megatron_wrap.parallel import rank_log
from megatron_wrap.parallel.watch import flight_recorder
from megatron_wrap.parallel.watch.ending import LAUNCHER_FOLDER
from megatron_wrap.parallel.watch.interrupts import INTERRUPTED, RESUME
from megatron_wrap.platform.base.machine import this_machine

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

BACKEND = "megatron_wrap_c10d"
"""Name of torchrun's rendezvous c10d for a fixed number of nodes, which find each other at one address of the first."""
_JOIN_SECONDS = 600
"""That a node waits for the others, as torch's own default."""
_SIMULTANEOUS_SECONDS = 1.0
"""Within which the errors of processes that lost one may be recorded before its end is noticed."""
_INTERRUPTIBLE = """
import signal, sys
try:
    {statement}
except KeyboardInterrupt:  # in the imports; later ones are reported with the run's iteration
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from megatron_wrap.parallel.watch.ending import record_end
    record_end(130)
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
    own_exit_codes: bool = True,
) -> int:
    """Runs the processes of this node under torchrun's agent; returns 0 if all have ended as a run does, else the exit
    code of the first one that has not.

    Those of a run on one node listen on the loopback interface only.

    Args:
        program: arguments of python in each process.
        config: of the run; None: there is none.
        signals: entered; what a signal does. None: it ends the processes at once.
        seconds_to_meet: that node 0 waits for the others, at most; None: torch's 10 minutes.
        own_exit_codes: the program may end where it likes with any exit code, as a user's script. False: it is within
            `exit_on_user_error`, which records its end, and 0, 2, 75 and 130 count only with this record.

    Raises:
        ProcessError: the nodes have not met.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # the agent logs every failed process; one report is enough, and a process reports a user's error itself
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _set_variables(nodes, config)
    launch = _torchrun(nodes, seconds_to_meet)
    if signals is not None and "signals_to_handle" in {field.name for field in fields(launch)}:  # torch 2.10
        launch = replace(launch, signals_to_handle=AGENT_SIGNALS)
    logs = None if signals is None or config is None else Path(output_dir(config), "logs")
    watch: ProcessWatch | None = None
    failures: Mapping[int, ProcessFailure] = {}
    with ExitStack() as written:
        folder = written.enter_context(_folder()) if signals is None else signals.folder
        if signals is not None:
            written.enter_context(flight_recorder.written_into(folder))
        if logs is not None and config is not None:
            written.enter_context(rank_log.written_into(logs))
            watch = _watch(folder, nodes, config, own_exit_codes)
            written.callback(watch.close)
        try:
            elastic_launch(launch, sys.executable)("-u", *program)
        except ChildFailedError as failed:
            failures = failed.failures
        except (RendezvousError, DistError) as error:
            reason, minutes = " ".join(str(error.__cause__ or error).split()), (seconds_to_meet or _JOIN_SECONDS) // 60
            raise ProcessError(
                f"{nodes.num_nodes} nodes do not meet at {launch.rdzv_endpoint} ({reason[:300]}); start the command on "
                f"all of them within {minutes} min, and open all TCP ports between them, or set MASTER_PORT to an open "
                "one"
            ) from error
        except SignalException as received:
            return 128 + received.sigval if signals is None else exit_code_of(received.sigval)
        return _exit_code(_ranks(nodes), failures, ProcessRecords(folder, own_exit_codes), watch, logs)


def _set_variables(nodes: Nodes, config: RunConfig | None) -> None:
    """Set environment variables that the processes inherit and that torch reads before a configuration."""
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nodes.processes_per_node)))
    if config is not None:
        machine = this_machine(config.init.platform)
        os.environ[CONNECTIONS] = str(cuda_connections(config, machine, os.environ.get(CONNECTIONS)).value)


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder for the files of the processes that are started inside the block."""
    with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as folder:
        os.environ[LAUNCHER_FOLDER] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop(LAUNCHER_FOLDER, None)


def _torchrun(nodes: Nodes, seconds_to_meet: int | None) -> LaunchConfig:
    """Options of torchrun; those of one node register a rendezvous on the loopback interface."""
    from torch.distributed.launcher.api import LaunchConfig

    from megatron_wrap.parallel import loopback

    local = nodes.num_nodes == 1
    if local:
        loopback.register_rendezvous()
        loopback.prefer_loopback()
    address, port = (
        (loopback.ADDRESS, nodes.master_port) if local else (nodes.master_address, nodes.master_port or MEETING_PORT)
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


def _ranks(nodes: Nodes) -> range:
    first = nodes.node_rank * nodes.processes_per_node
    return range(first, first + nodes.processes_per_node)


def _watch(folder: Path, nodes: Nodes, config: RunConfig, own_exit_codes: bool) -> ProcessWatch:
    report = Path(output_dir(config), FAILURE if nodes.node_rank == 0 else f"node{nodes.node_rank}_{FAILURE}")
    seconds, is_alone = config.init.stopped_process_seconds, nodes.num_nodes == 1
    return ProcessWatch(folder, _ranks(nodes), report, seconds, is_alone, own_exit_codes)


def _exit_code(
    ranks: range,
    failures: Mapping[int, ProcessFailure],
    records: ProcessRecords,
    watch: ProcessWatch | None,
    logs: Path | None,
) -> int:
    """The exit code of the command, after the end of all processes. If one has failed, or left the run, the last lines
    of the first one and which one it was are printed.

    Args:
        failures: of torchrun: rank -> exit code of each process that did not end with 0.
    """
    if watch is not None:
        watch.close()
    codes = {rank: failures[rank].exitcode if rank in failures else 0 for rank in ranks}
    if watch is not None:
        codes |= dict.fromkeys(watch.held, 0)
    for code in (INTERRUPTED, RESUME):  # a request, which rank 0 has reported; others may have been terminated
        if any(codes[rank] == code and records.has_recorded(rank, code) for rank in ranks):
            return code
    failed = {rank: code for rank, code in codes.items() if code != 0 or not records.accounts_for(rank, code)}
    if not failed:
        return 0
    rank = _first_failure(failed, failures, records, watch)
    code = failed[rank]
    if code == 2 and records.has_recorded(rank, code):  # a user's error, which the process has reported
        return 2
    sentence = f"rank {rank} {cause_of(code)}"
    if watch is not None:
        errors = {of: _error(records.ending(of), failures.get(of)) for of in failed}
        sentence = watch.failed(failed, rank, errors[rank][0], {of: text for of, (_, text) in errors.items()})
    if logs is not None and rank != 0:  # the console has those of rank 0
        sys.stderr.write(rank_log.summary(logs, rank))
    where = "messages of the processes are above" if logs is None else f"{logs} has the messages of each rank"
    sys.stderr.write(f"error: {sentence}; {where}\n")
    return 1 if code < 0 or (code in ENDS and not records.has_own_exit_code(rank)) else code


def _error(ending: Ending | None, failure: ProcessFailure | None) -> tuple[str, str]:
    """Message and traceback of a process's error, as `exit_on_user_error` or torch's `record` has left it."""
    if ending is not None or failure is None or not isinstance(failure.message, dict):
        return ("", "") if ending is None else (ending.message, ending.traceback)
    return str(failure.message.get("message", "")), str(failure.message.get("extraInfo", {}).get("py_callstack", ""))


def _first_failure(
    failed: Mapping[int, int],
    failures: Mapping[int, ProcessFailure],
    records: ProcessRecords,
    watch: ProcessWatch | None,
) -> int:
    """The rank that left without an error, since the others' errors follow from that; else the one whose error was
    recorded first; else torchrun's first failure that its agent did not cause."""
    errors = {rank: each.time for rank in failed if (each := records.ending(rank)) is not None and each.message}
    if watch is not None and watch.first_end is not None:
        rank, at = watch.first_end
        is_consequence = failed.get(rank) in (None, -signal.SIGTERM, -signal.SIGABRT)  # of torchrun's agent, of NCCL
        if rank not in errors and not is_consequence and at < min(errors.values(), default=at) + _SIMULTANEOUS_SECONDS:
            return rank
    if errors:
        return min(errors, key=lambda rank: errors[rank])
    by_themselves = [rank for rank, code in failed.items() if code != -signal.SIGTERM]
    return min(by_themselves or failed, key=lambda rank: failures[rank].timestamp if rank in failures else 0)


# ---- how the nodes find each other ----


def register_rendezvous() -> None:
    """Make BACKEND known to torchrun's launcher. Its configuration has `rank`, the number of this node."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _rendezvous)


def _rendezvous(parameters: Any) -> Any:
    """The handler of torch's c10d, with three differences.

    The order of the nodes is that of their numbers, not of their host names. Ranks use the store at the endpoint, which
    their agents have just reached: the host name of another node may have no address. An agent looks for no further
    nodes, since their number is fixed, and therefore survives that of the first node while its own processes save.
    """
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    class FixedNodes(DynamicRendezvousHandler):
        """See `_rendezvous`."""

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            joined = super().next_rendezvous()
            return RendezvousInfo(joined.store, int(parameters.config["rank"]), joined.world_size, endpoint)

        @property
        def use_agent_store(self) -> bool:
            return True

        def num_nodes_waiting(self) -> int:
            return 0

    # the node whose name comes first would open a second store, at its host name
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    backend, store = create_backend(parameters)
    endpoint = RendezvousStoreInfo(store.host, store.port)  # type: ignore[attr-defined]
    nodes = parameters.min_nodes, parameters.max_nodes
    join = timedelta(seconds=int(parameters.config.get("join_timeout", _JOIN_SECONDS)))
    return FixedNodes.from_backend(parameters.run_id, store, backend, *nodes, timeout=RendezvousTimeout(join=join))
