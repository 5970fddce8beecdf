"""Handling of signals that arrive at the program which started a run's processes on this node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from megatron_wrap.parallel.watch.ending import INTERRUPTED, REPEATED_SECONDS, RESUME
from megatron_wrap.parallel.watch.stop_requests import LAUNCHER_FOLDER, READY, REQUEST, SIGNALS, STOPPED, say_received

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
