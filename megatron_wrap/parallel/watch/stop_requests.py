"""Requests to end a training run after its next step: a signal, a file, or the end of its time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_wrap.parallel.watch.ending import (
    INTERRUPTED,
    LAUNCHER_FOLDER,
    REPEATED_SECONDS,
    RESUME,
    InterruptWatch,
    interrupt,
    record_end,
)

STOP_FILE = "STOP"
"""Name of the file in the output folder that requests a stop."""
REQUEST, READY, STOPPED = "request", "ready", "stopped"
"""Files in LAUNCHER_FOLDER: the number of a signal that the launcher received; a mark that the processes react to
requests; a mark that they have ended for one."""
_FILES_SECONDS = 0.5
"""Seconds between checks for files."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class StopReason:
    """Reason for which a run ends before its last step."""

    text: str
    """Reason as text, such as "stopped by SIGTERM"; messages add the iteration."""
    exit_code: int


def of_signal(number: int) -> StopReason:
    """The stop reason of a signal."""
    if number == signal.SIGINT:
        return StopReason("interrupted", INTERRUPTED)
    return StopReason(f"stopped by {signal.Signals(number).name}", RESUME)


def say_received(number: int) -> None:
    """Print that a signal has been received; not by the logger, which the signal may have interrupted."""
    if number == signal.SIGINT:
        text = "Ctrl-C: the run saves after this step and ends; a second Ctrl-C ends it at once"
    else:
        text = f"{signal.Signals(number).name}: the run saves after this step and ends"
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


class RunStopped(SystemExit):
    """Ends the program after a run was stopped and saved; its code is that of `StopReason`."""


class StopRequests:
    """The requests that this process knows. All processes have to agree about them, in the reduction of a step.

    Args:
        output_dir: output folder of the run, in which global rank 0 checks for the file STOP.
        rank, local_rank: global and local rank of this process.
        minutes: time limit of the run; None: no limit.
        minutes_before_slurm_end: the run ends that long before Slurm's job does; None: Slurm's end is ignored.
    """

    def __init__(
        self,
        output_dir: Path,
        rank: int,
        local_rank: int,
        minutes: float | None,
        minutes_before_slurm_end: float | None,
    ) -> None:
        self._rank, self._started = rank, time.monotonic()
        self._seconds = None if minutes is None else 60 * minutes
        self._minutes = minutes
        job_end = os.environ.get("SLURM_JOB_END_TIME", "")
        self._slurm_end = None
        if minutes_before_slurm_end is not None and job_end.isdigit():
            self._slurm_end = int(job_end) - 60 * minutes_before_slurm_end
        self._file = output_dir / STOP_FILE if rank == 0 else None
        folder = os.environ.get(LAUNCHER_FOLDER)
        self._launcher = Path(folder) if folder and local_rank == 0 else None
        self._reason: StopReason | None = None
        self._looked = 0.0
        self._first_interrupt: float | None = None
        self._undo: list[tuple[int, Any]] = []
        self._watch: InterruptWatch | None = None

    def begin(self, signals: bool, watch: InterruptWatch | None = None) -> None:
        """React to requests from now on; an existing file STOP is that of an earlier run, and is removed.

        Args:
            signals: whether to react to SIGINT, SIGTERM and SIGUSR1 as well, where the program has no handlers of its
                own.
            watch: watch of this process's interrupts, for which the first one is a request from now on.
        """
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        if not signals or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler, interrupt):
                self._undo.append((number, before))
                signal.signal(number, self._interrupted if number == signal.SIGINT else self._signalled)
                if number == signal.SIGINT and watch is not None:
                    self._watch = watch
                    watch.first_is_a_request(True)
        if self._launcher is not None:
            _touch(self._launcher / READY)

    def pending(self) -> bool:
        """Whether this process knows of a request."""
        if self._reason is None and time.monotonic() - self._looked >= _FILES_SECONDS:
            self._looked = time.monotonic()
            self._reason = self._of_files() or self._of_time()
        return self._reason is not None

    @property
    def reason(self) -> StopReason | None:
        """Reason of the request that this process knows; None if only another process knows one."""
        return self._reason

    def fulfilled(self, exit_code: int) -> None:
        """After the run has stopped for a request, remove the file STOP, notify the launcher, and record the run's exit
        code."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        if self._launcher is not None:
            _touch(self._launcher / STOPPED)
        record_end(exit_code)

    def close(self) -> None:
        """Restore the handlers of signals; a second call does nothing."""
        for number, before in self._undo:
            signal.signal(number, before)
        if self._watch is not None:
            self._watch.first_is_a_request(False)
        if self._undo and self._launcher is not None:
            with contextlib.suppress(OSError):
                (self._launcher / READY).unlink()
        self._undo = []

    def _of_files(self) -> StopReason | None:
        if self._file is not None and self._file.exists():
            return StopReason(f"stopped by the file {self._file}", 0)
        if self._launcher is not None:
            with contextlib.suppress(OSError, ValueError):
                return of_signal(int((self._launcher / REQUEST).read_text(encoding="utf-8")))
        return None

    def _of_time(self) -> StopReason | None:
        if self._seconds is not None and time.monotonic() - self._started >= self._seconds:
            return StopReason(f"stopped by stop_after_minutes: {self._minutes:g}", 0)
        if self._slurm_end is not None and time.time() >= self._slurm_end:
            return StopReason("stopped before the end of the Slurm job", RESUME)
        return None

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._reason is None:
            self._reason = of_signal(number)
            self._say(number)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
            self._reason = of_signal(number)
            self._say(number)
        elif now - self._first_interrupt > REPEATED_SECONDS:
            interrupt(number, frame)

    def _say(self, number: int) -> None:
        if self._rank == 0:
            say_received(number)


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.touch()
