"""The processes of a run: start and end of torch.distributed, and one message about an error from all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TextIO

import torch.distributed as dist

from megatron_wrap.errors import ExitInRun, MegatronWrapError
from megatron_wrap.parallel import rank_log
from megatron_wrap.parallel.loopback import loopback_store
from megatron_wrap.parallel.nodes import check_versions, this_node
from megatron_wrap.parallel.watch.ending import INTERRUPTED, LAUNCHER_FOLDER, InterruptWatch, one_interrupt, record_end
from megatron_wrap.utils.pools.processes import end_with_parent


@dataclass(frozen=True)
class Processes:
    """This process among all processes of the run."""

    rank: int
    world_size: int
    local_rank: int
    owns_group: bool
    """Whether `start` initialized torch.distributed, so that `stop` has to destroy it."""


def environment_rank() -> int:
    """Global rank set by torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """Number of processes: of the existing process group, else set by torchrun, else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def start(backend: str, timeout_minutes: float) -> Processes:
    """Initialize torch.distributed from torchrun's environment, or as a single process without it.

    A process group that the caller has already initialized is used unchanged. NCCL connects a group at its first
    collective: with a `device_id` it would connect all of Megatron-Core's groups at once, with 7 GiB of buffers on each
    GPU for groups that a run does not use.

    Raises:
        PlatformError: the nodes have different packages.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_initialized():
        _stores[:] = [dist.distributed_c10d._get_default_store()]
        return Processes(dist.get_rank(), dist.get_world_size(), local_rank, owns_group=False)
    timeout = timedelta(minutes=timeout_minutes)
    if _is_under_torchrun():
        end_with_parent(signal.SIGTERM)
        _begin_log()
    if "RANK" in os.environ:
        store, rank, world_size = rendezvous(timeout)
        check_versions(store, rank, this_node())
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        store = loopback_store(timeout)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    _stores[:] = [dist.distributed_c10d._get_default_store()]
    return Processes(dist.get_rank(), dist.get_world_size(), local_rank, owns_group=True)


def rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Store, rank and number of processes from torchrun's environment.

    torchrun's store outlives a process group, and the next run in the same program would read outdated addresses.
    Each start therefore has its own prefix.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    starts = store.add(f"megatron_wrap/starts_of_rank_{rank}", 1)
    return dist.PrefixStore(f"megatron_wrap/start_{starts}", store), rank, world_size


def _begin_log() -> None:
    """Write what this process prints into its log. Under `megatron-wrap train`, which prints the last lines of the
    process that fails first, the console is that of rank 0."""
    if not _consoles:
        rank, reports_failures = environment_rank(), LAUNCHER_FOLDER in os.environ
        console = rank_log.begin(rank, environment_world_size(), keeps_console=rank == 0 or not reports_failures)
        _consoles.extend([] if console is None else [console])


_consoles: list[TextIO] = []
"""Console's stderr, for the message of `exit_on_user_error`, where this process's own stderr is its log; else empty."""
_stores: list[dist.Store] = []
"""The store of the newest process group, which `exit_on_user_error` needs after the group has ended."""


def stop(processes: Processes) -> None:
    """Destroy the process group if `start` initialized it."""
    if processes.owns_group and dist.is_initialized():
        dist.destroy_process_group()


_HEAD_START_SECONDS = 1.0
"""torchrun terminates all ranks when one has ended. The rank that prints the message must end first, right after it has
recorded the error: a rank that is terminated earlier cannot print, or its signal is reported as the root cause."""


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a `MegatronWrapError` once over all ranks and exit with its exit code; for entry points.

    The first rank that claims the message in the rendezvous store prints it. Before the store exists, every rank has
    read the same configuration, and rank 0 prints. Every rank records its error for torchrun's failure summary.

    After Ctrl-C, rank 0 prints one sentence, and all ranks end with exit code 130.

    The launcher of `megatron-wrap train` is notified of the end of the block, of an interrupt and of an error: the exit
    code of examples/train.py counts only with this record.
    """
    with one_interrupt(), _user_errors_reported():
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if environment_rank() == 0:
                print(str(interrupt) or "interrupted", file=sys.stderr, flush=True)  # noqa: T201
            record_end(INTERRUPTED)
            _exit(INTERRUPTED)
        record_end(0)


@contextlib.contextmanager
def _user_errors_reported() -> Iterator[None]:
    try:
        yield
    except MegatronWrapError as error:
        message = f"error: {error}"
        if _claim_message():
            for stream in dict.fromkeys([*_consoles, sys.stderr]):
                print(message, file=stream, flush=True)
        elif _is_under_torchrun():
            time.sleep(_HEAD_START_SECONDS)
        if not isinstance(error, ExitInRun):
            _record(error.exit_code, message, message)
            _exit(error.exit_code)
        _record(None, message, traceback.format_exc())
        _exit(error.requested if LAUNCHER_FOLDER in os.environ else error.exit_code)  # the launcher reports the code
    except Exception as error:
        _record(1, f"{type(error).__name__}: {error}", traceback.format_exc())
        raise


def watch_interrupts(sentence: Callable[[], str]) -> InterruptWatch | None:
    """An `InterruptWatch` in a process that torchrun has started, with others; else None."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and _is_under_torchrun() and environment_world_size() > 1:
        return InterruptWatch(sentence, prints=environment_rank() == 0)
    return None


def _is_under_torchrun() -> bool:
    return bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))


def _exit(code: int) -> NoReturn:
    """End this process. Other ranks may wait for it in a collective, so no destructor of a process group may wait for
    them. A thread other than the main one raises SystemExit instead; the program that started it, such as a worker of
    Ray, ends the process."""
    sys.stdout.flush()
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit(code)
    if _is_under_torchrun() or dist.is_initialized():
        os._exit(code)
    sys.exit(code)


def _record(exit_code: int | None, message: str, details: str) -> None:
    """Record an error for `megatron-wrap train`, and for torchrun's agent in the file from which it reads the root
    cause; it prints `details`.

    The format is that of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`.
    """
    record_end(exit_code, message, "" if details == message else details)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # The agent reports the earliest error, in seconds, as the root cause, and of equal ones the lowest rank. A rank
    # that the agent terminates within this second must not precede the rank that failed.
    facts = {"py_callstack": details, "timestamp": str(int(time.time()) - 1)}
    content = {"message": {"message": message, "extraInfo": facts}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def _claim_message() -> bool:
    """Whether this rank prints the error. It may be the only one that has it, and have ended its process group."""
    if environment_world_size() == 1:
        return True
    if not _stores:
        return environment_rank() == 0
    try:
        return _stores[-1].add("megatron_wrap/error_claims", 1) == 1
    except Exception:  # the store was lost with another rank, which has printed its own error
        return False
