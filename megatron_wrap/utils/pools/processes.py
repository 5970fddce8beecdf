"""Forked processes that apply one function to many items, with `concurrent.futures`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, cast

from megatron_wrap.errors import DataError
from megatron_wrap.utils.pools.threads import submitted_ahead

Item = TypeVar("Item")
Result = TypeVar("Result")
_FUNCTION: ContextVar[Callable[[Any], Any]] = ContextVar("the function of a worker process")
_AHEAD = 2
"""Number of items that a process has at the same time: it computes one while the next is on its way."""
_CHECK_SECONDS = 5.0
_PARENT_DEATH_SIGNAL = 1
"""The option PR_SET_PDEATHSIG of linux/prctl.h."""


class ProcessPool(Generic[Item, Result]):
    """Processes that apply `function`; results come in the order of the items, whatever the number of processes.

    The function is not pickled; items and results are. It may use neither the device nor a process group. The processes
    are forked here, so make a pool before files are opened and threads started, in the thread that uses it. They end
    with `close`, also in the middle of an item, and when this process ends, however it ends.

    Args:
        function: function of an item.
        count: number of processes, at least 1.
    """

    def __init__(self, function: Callable[[Item], Result], count: int) -> None:
        self._ahead = _AHEAD * count
        context = multiprocessing.get_context("fork")
        self._executor = cast(Any, ProcessPoolExecutor(count, context, _start, (function, os.getpid())))
        with forking():
            started = self._executor.submit(os.getpid)  # the first call forks all processes
        self._processes = list(self._executor._processes.values())
        # Only the workers use these ends: without copies here, the executor notices that a worker was killed while it
        # received or sent.
        self._executor._call_queue._reader.close()
        self._executor._result_queue._writer.close()
        self._result(started)

    def map(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Each item and its result. At most two items of each process are under way.

        Raises:
            DataError: a process was killed.
            Exception: the exception that `function` or `items` raised.
        """
        for item, future in submitted_ahead(self._submit, items, self._ahead - 1):
            yield item, self._result(future)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        self._executor.shutdown(cancel_futures=True)

    def _submit(self, item: Item) -> Future[Result]:
        try:
            return cast("Future[Result]", self._executor.submit(_apply, item))
        except BrokenProcessPool:
            raise _death() from None

    def _result(self, future: Future[Any]) -> Any:
        while not wait([future], _CHECK_SECONDS).done:
            if not all(process.is_alive() for process in self._processes):  # killed while it sent a result
                raise _death()
        try:
            return future.result()
        except BrokenProcessPool:
            raise _death() from None


def _death() -> DataError:
    return DataError(
        "a worker process was killed, as the kernel does when memory runs out; run the same command again, with fewer "
        "processes if this happens again"
    )


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """A context for a fork, in which the new process gets no garbage of this process, and no warning about its threads
    is shown."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about threads; those of torch and NCCL hold no lock that a worker takes
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if collecting:
            gc.enable()


def become_worker() -> None:
    """Prepare a process that was forked in `forking`; its first call."""
    # objects of the parent are never collected here: a process group would wait for a thread that was not forked
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def end_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when the process that started it dies. Linux only; elsewhere nothing
    happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)


def picklable(error: BaseException) -> Exception:
    """The error, or one with its text if the error itself cannot be pickled."""
    with contextlib.suppress(Exception):
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _start(function: Callable[[Any], Any], parent: int) -> None:
    """Prepare a worker process; its first call."""
    become_worker()
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before this call
        os._exit(1)
    _FUNCTION.set(function)


def _apply(item: Any) -> Any:
    try:
        return _FUNCTION.get()(item)
    except Exception as error:
        sent = picklable(error)
        if sent is error:
            raise
        raise sent from error
