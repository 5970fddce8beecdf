"""Runs the processes of this node under torchrun's agent, passes signals on to them, and reports the process that
failed or left the run first."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.errors import ProcessError
from megatron_wrap.launch.interface import MEETING_PORT, Nodes
from megatron_wrap.launch.process_records import ENDS, ProcessRecords
from megatron_wrap.launch.process_watch import FAILURE, ProcessWatch, cause_of, error_of, first_failure
from megatron_wrap.parallel import rank_log
from megatron_wrap.parallel.watch import flight_recorder
from megatron_wrap.parallel.watch.ending import INTERRUPTED, REPEATED_SECONDS, RESUME
from megatron_wrap.parallel.watch.stop_requests import LAUNCHER_FOLDER, READY, REQUEST, SIGNALS, STOPPED, say_received
from megatron_wrap.platform.base.machine import this_machine

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

AGENT_SIGNALS = "SIGHUP,SIGQUIT"
"""Signals that are left to torchrun's agent, which ends the processes at once."""


class LauncherSignals:
    """Context in which a signal lets training processes save after their step and end by themselves. Before they train,
    and at a second Ctrl-C, it ends them at once, as torchrun's agent does.

    Args:
        seconds: time limit for the processes to save and end; None: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.folder = Path()
        """Folder in which this program and the processes leave files for each other."""
        self._first: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> LauncherSignals:
        self.folder = Path(tempfile.mkdtemp(prefix="megatron-wrap-"))
        os.environ[LAUNCHER_FOLDER] = str(self.folder)
        handlers = dict.fromkeys(SIGNALS, self._received) | {signal.SIGALRM: self._out_of_time}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.environ.pop(LAUNCHER_FOLDER, None)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def stopped(self) -> bool:
        """Whether the run has ended on a request, before its last step."""
        return (self.folder / STOPPED).exists()

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None and (self.folder / READY).exists():
            self._first = now
            request = self.folder / f".{REQUEST}"
            with contextlib.suppress(OSError):
                request.write_text(str(number), encoding="utf-8")
                request.rename(self.folder / REQUEST)
            say_received(number)
            if self._seconds is not None:
                signal.setitimer(signal.ITIMER_REAL, self._seconds)
        elif self._first is None or (number == signal.SIGINT and now - self._first > REPEATED_SECONDS):
            _end_processes(number)

    def _out_of_time(self, number: int, frame: FrameType | None) -> None:
        _end_processes(signal.SIGKILL)


def _end_processes(number: int) -> None:
    """Make torchrun's agent, in whose process this handler runs, end all processes with a signal."""
    from torch.distributed.elastic.multiprocessing import SignalException

    raise SignalException(f"signal {number}", signal.Signals(number))


def exit_code_of(number: int) -> int:
    """Exit code of a run whose processes were ended with this signal."""
    return INTERRUPTED if number == signal.SIGINT else RESUME if number in SIGNALS else 128 + number


_BACKEND = "megatron_wrap_c10d"
"""Name of a variant of torchrun's rendezvous c10d for a fixed number of nodes, which meet at an address of the first
node."""
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
    """Arguments of python that call a function with other functions, and then with the words that follow these
    arguments. Each function is imported from its module."""
    imports = "; ".join(f"from {each.__module__} import {each.__name__}" for each in (function, *functions))
    names = [each.__name__ for each in functions]
    return python_statement(f"import sys; {imports}; {function.__name__}({', '.join([*names, '*sys.argv[1:]'])})")


def launch_processes(
    nodes: Nodes,
    program: Sequence[str],
    config: RunConfig | None,
    signals: LauncherSignals | None = None,
    seconds_to_meet: int = 600,
    own_exit_codes: bool = True,
) -> int:
    """Runs the processes of this node under torchrun's agent; returns 0 if all have ended as a run does, else the exit
    code of the first process that has not.

    The processes of a run on one node listen on the loopback interface only.

    Args:
        program: arguments of python in each process.
        config: the run's configuration; None: there is none.
        signals: an entered context; the output folder of the run gets the logs of the processes and `failure.json`.
            None: a signal ends the processes, and they print to the console.
        seconds_to_meet: largest number of seconds that a node waits for the others.
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
    launch, watch = _torchrun(nodes, seconds_to_meet), None
    output = None if signals is None or config is None else Path(output_dir(config))
    failures: Mapping[int, ProcessFailure] = {}
    with ExitStack() as during:
        signals = signals or during.enter_context(LauncherSignals(None))
        records = ProcessRecords(signals.folder, own_exit_codes)
        during.enter_context(flight_recorder.written_into(signals.folder))
        if output is not None and config is not None:
            during.enter_context(rank_log.written_into(output / "logs"))
            report = output / (FAILURE if nodes.node_rank == 0 else f"node{nodes.node_rank}_{FAILURE}")
            seconds, is_alone = config.init.stopped_process_seconds, nodes.num_nodes == 1
            watch = ProcessWatch(records, nodes.ranks, report, seconds, is_alone)
            during.callback(watch.close)
        try:
            elastic_launch(launch, sys.executable)("-u", *program)
        except ChildFailedError as failed:
            failures = failed.failures
        except (RendezvousError, DistError) as error:
            raise _not_met(nodes, launch.rdzv_endpoint, seconds_to_meet, error) from error
        except SignalException as received:
            return exit_code_of(received.sigval)
        return _exit_code(nodes.ranks, failures, records, watch, None if output is None else output / "logs")


def _not_met(nodes: Nodes, endpoint: str, seconds: int, error: Exception) -> ProcessError:
    reason = " ".join(str(error.__cause__ or error).split())[:300]
    return ProcessError(
        f"{nodes.num_nodes} nodes do not meet at {endpoint} ({reason}); start the command on all of them within "
        f"{seconds} s, and open all TCP ports between them, or set MASTER_PORT to an open one"
    )


def _set_variables(nodes: Nodes, config: RunConfig | None) -> None:
    """Set environment variables that the processes inherit and that torch reads before a configuration."""
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nodes.processes_per_node)))
    if config is not None:
        machine = this_machine(config.init.platform)
        os.environ[CONNECTIONS] = str(cuda_connections(config, machine, os.environ.get(CONNECTIONS)).value)


def _torchrun(nodes: Nodes, seconds_to_meet: int) -> LaunchConfig:
    """Options of torchrun; for a run on one node, the rendezvous is on the loopback interface."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig

    from megatron_wrap.parallel import loopback

    address, port = nodes.master_address, nodes.master_port or MEETING_PORT
    backend, meeting = "static", {"rank": nodes.node_rank, "timeout": seconds_to_meet}
    if nodes.num_nodes == 1:
        loopback.register_rendezvous()
        loopback.prefer_loopback()
        backend, meeting, address, port = loopback.BACKEND, {}, loopback.ADDRESS, nodes.master_port
    elif nodes.rendezvous_id is not None:
        rendezvous_handler_registry.register(_BACKEND, _rendezvous)
        backend = _BACKEND
    return LaunchConfig(
        min_nodes=nodes.num_nodes,
        max_nodes=nodes.num_nodes,
        nproc_per_node=nodes.processes_per_node,
        run_id=uuid.uuid4().hex if nodes.num_nodes == 1 else nodes.rendezvous_id or "megatron-wrap",
        rdzv_backend=backend,
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs=meeting,
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle=AGENT_SIGNALS,
    )


def _exit_code(
    ranks: range,
    failures: Mapping[int, ProcessFailure],
    records: ProcessRecords,
    watch: ProcessWatch | None,
    logs: Path | None,
) -> int:
    """The exit code of the command, after the end of all processes. If a process has failed or left the run, the first
    such process is named, and the last lines of its log are printed.

    Args:
        failures: torchrun's failures: rank -> failure of each process that did not end with exit code 0.
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
    rank = first_failure(failed, failures, records, None if watch is None else watch.first_end)
    code = failed[rank]
    if code == 2 and records.has_recorded(rank, code):  # a user's error, which the process has reported
        return 2
    sentence = f"rank {rank} {cause_of(code)}"
    if watch is not None:
        errors = {of: error_of(records.ending(of), failures.get(of)) for of in failed}
        sentence = watch.failed(failed, rank, errors[rank][0], {of: text for of, (_, text) in errors.items()})
    if logs is not None and rank != 0:  # the console has the lines of rank 0
        sys.stderr.write(rank_log.summary(logs, rank))
    where = "messages of the processes are above" if logs is None else f"{logs} has the messages of each rank"
    sys.stderr.write(f"error: {sentence}; {where}\n")
    return 1 if code < 0 or (code in ENDS and not records.has_own_exit_code(rank)) else code


# ---- how the nodes find each other ----


def _rendezvous(parameters: Any) -> Any:
    """The handler of torch's c10d, with three differences.

    The nodes are ordered by their numbers, not by their host names. Ranks use the store at the endpoint, which their
    agents have just reached: the host name of another node may have no address. An agent looks for no further nodes,
    since their number is fixed, and therefore survives the agent of the first node while its own processes save.
    """
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    class FixedNodes(DynamicRendezvousHandler):
        """Rendezvous handler for a fixed number of nodes, see `_rendezvous`."""

        def get_backend(self) -> str:
            return _BACKEND

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
    join = timedelta(seconds=parameters.config["timeout"])
    return FixedNodes.from_backend(parameters.run_id, store, backend, *nodes, timeout=RendezvousTimeout(join=join))
