"""Limits of the time and memory that a chat template may take for one row, and of the size of the text of a row."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from megatron_wrap.errors import DataError

MAX_CHARACTERS = 1 << 25
"""Of a text that is tokenized, or that a chat template renders. A token takes about 300 bytes while it is made."""
MAX_RENDER_SECONDS = 30.0
"""Computing time of all renderings of one row, each of its turns included."""
MAX_RENDER_BYTES = 1 << 29
"""Bytes by which the process may grow during them."""
MAX_STOPPED_IN_A_ROW = 5
"""Renderings of a process that are stopped in a row before the template is blamed instead of the rows."""
_POLL_SECONDS = 0.1
_IDLE_POLLS = 50
_GROWTH_SECONDS = 0.05
"""Computing time from which on a rendering is blamed for the growth of its process; an ordinary one takes less."""
Result = TypeVar("Result")


def check_text(text: str) -> None:
    """Refuse a text that no tokenizer can encode.

    Raises:
        DataError: it contains a lone surrogate, or more than MAX_CHARACTERS characters.
    """
    if len(text) > MAX_CHARACTERS:
        raise DataError(
            f"a text of {len(text):,} characters, more than the {MAX_CHARACTERS:,} that a sample may have; divide it"
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(lone_surrogate(error)) from None


def lone_surrogate(error: UnicodeEncodeError) -> str:
    """The message about a text that UTF-8 cannot represent."""
    return f"contains the lone surrogate {error.object[error.start]!a}, which is no character; correct it"


class LimitExceeded(BaseException):
    """A call of `within_limits` was stopped. No Exception, so that no code of a template's library catches it."""


def within_limits(function: Callable[[], Result]) -> Result:
    """`function()`, in any thread.

    Raises:
        LimitExceeded: it took more than MAX_RENDER_SECONDS of its thread's computing time, or the process grew by more
            than MAX_RENDER_BYTES meanwhile. It is stopped between two Python instructions, not inside a function
            written in C.
    """
    return _watch(os.getpid()).run(function)


def stopped_in_a_row() -> int:
    """Calls of `within_limits` that were stopped in this process since the last one that was not."""
    return _watch(os.getpid()).stopped_in_a_row


@dataclass(eq=False)
class _Call:
    thread: int
    seconds: float | None = None
    """Computing time of the thread when the call was first seen; None: not seen yet."""
    resident_bytes: int = 0
    is_stopped: bool = False

    def check(self) -> None:
        """Raise LimitExceeded in the thread if the call takes too much."""
        if self.is_stopped:
            return
        seconds, resident_bytes = _thread_seconds(self.thread), _resident_bytes()
        if self.seconds is None:
            self.seconds, self.resident_bytes = seconds, resident_bytes
            return
        taken, growth = seconds - self.seconds, resident_bytes - self.resident_bytes
        if taken > MAX_RENDER_SECONDS or (taken > _GROWTH_SECONDS and growth > MAX_RENDER_BYTES):
            self.is_stopped = True
            _raise_in(self.thread, LimitExceeded)


class _Watch:
    """A thread that raises LimitExceeded in the threads whose call takes too much.

    Signals reach only the main thread, and a sandbox of jinja2 has no limits. The thread ends when there are no calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._count = 0
        self._is_running = False
        self.stopped_in_a_row = 0

    def run(self, function: Callable[[], Result]) -> Result:
        """See `within_limits`."""
        call = _Call(threading.get_ident())
        with self._lock:
            self._calls[call.thread] = call
            self._count += 1
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._observe, name="limits of templates", daemon=True).start()
        try:
            try:
                return function()
            finally:
                with self._lock:
                    self._calls.pop(call.thread, None)
        finally:
            self.stopped_in_a_row = self.stopped_in_a_row + 1 if call.is_stopped else 0
            if call.is_stopped:
                _raise_in(call.thread, None)  # one that has not been raised yet

    def _observe(self) -> None:
        idle, count = 0, -1
        while True:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                idle = idle + 1 if count == self._count and not self._calls else 0
                count = self._count
                if idle == _IDLE_POLLS:
                    self._is_running = False
                    return
                for call in self._calls.values():
                    call.check()


@lru_cache(maxsize=1)
def _watch(process: int) -> _Watch:
    """That of a process: a forked one has no threads of its parent."""
    return _Watch()


def _thread_seconds(thread: int) -> float:
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
