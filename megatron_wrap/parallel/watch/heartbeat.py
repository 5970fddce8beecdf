"""Reports of a process of a run to the program that started it: every second that it runs, and each change of its phase
at once."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_wrap.metrics.phases import is_inside, listeners, num_changes
from megatron_wrap.parallel.watch import flight_recorder
from megatron_wrap.parallel.watch.ending import LAUNCHER_FOLDER

HEARTBEAT, STACKS = "rank_{}.json", "rank_{}.stacks"
"""Names of a rank's files in the launcher's folder."""
STACKS_SIGNAL = signal.SIGUSR2
"""Signal at which a process writes the stacks of all its threads, whatever it does."""
COLLECTIVES_REQUEST = "collectives"
"""Name of a file in the launcher's folder; once it exists, each process writes its flight recorder's record once."""
_SECONDS, _REQUEST_SECONDS = 1.0, 0.2
_JSON = {False: "false", True: "true"}
_DIGITS, _STATE_BYTES = 18, 256
"""Width of the progress counter in the file, in digits, and of the state that follows it, in bytes."""


class Heartbeat:
    """Shows this process's state in a file: iteration and phase, through a memory map, whenever a phase begins or ends,
    so that they are right however the process ends; and in a thread, every second, that it runs.

    Args:
        folder: folder of the launcher.
        rank: global rank of this process.
        where: returns the iteration under way, or None before the first, and the phase.
    """

    def __init__(self, folder: Path, rank: int, where: Callable[[], tuple[int | None, str]]) -> None:
        self._folder, self._rank, self._where, self._process = folder, rank, where, os.getpid()
        self._ends, self._closed = threading.Event(), _JSON[False]
        facts = {"rank": rank, "process": self._process, "host": socket.gethostname()}
        head = f'{json.dumps(facts)[:-1]}, "progress": '.encode()
        self._progress = slice(len(head), len(head) + _DIGITS)
        self._rest = slice(self._progress.stop, self._progress.stop + _STATE_BYTES)
        self._map: mmap.mmap | None = None
        file = folder / HEARTBEAT.format(rank)
        with contextlib.suppress(OSError):
            # written before it is mapped: a full disk is an OSError here, in a memory map it would end the process
            _replace(file, head + self._progress_text() + self._state_text())
            with file.open("r+b") as written:
                self._map = mmap.mmap(written.fileno(), self._rest.stop)
        with contextlib.suppress(OSError):
            stacks = os.open(folder / STACKS.format(rank), os.O_WRONLY | os.O_CREAT, 0o600)
            earlier, _stacks[:] = list(_stacks), [stacks]
            if signal.getsignal(STACKS_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
                # for the rest of the process: without a handler, a signal of the launcher would end it, also while
                # Python ends, which restores what was there before faulthandler's
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
                faulthandler.register(STACKS_SIGNAL, file=stacks)
            for descriptor in earlier:
                os.close(descriptor)
        listeners.append(self._show)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """End the thread; the last state stays. A second call does nothing."""
        if not self._ends.is_set():
            self._ends.set()
            self._closed = _JSON[True]
            listeners.remove(self._show)
            self._show()

    def _show(self) -> None:
        if self._map is not None and os.getpid() == self._process:  # not in a process that was forked from it
            self._map[self._rest] = self._state_text()

    def _state_text(self) -> bytes:
        iteration, phase = self._where()
        number, inside = "null" if iteration is None else iteration, _JSON[is_inside()]
        state = f', "iteration": {number}, "phase": "{phase}", "inside": {inside}, "closed": {self._closed}}}'
        return state.ljust(_STATE_BYTES).encode()

    def _progress_text(self) -> bytes:
        return f"{num_changes():{_DIGITS}}".encode()

    def _beat(self) -> None:
        file, is_recorded = self._folder / HEARTBEAT.format(self._rank), False
        while True:
            if self._map is not None:
                self._map[self._progress] = self._progress_text()
            with contextlib.suppress(OSError):
                os.utime(file)
            for _ in range(round(_SECONDS / _REQUEST_SECONDS)):
                if self._ends.wait(_REQUEST_SECONDS):
                    return
                if not is_recorded and (self._folder / COLLECTIVES_REQUEST).exists():
                    is_recorded = True
                    content = flight_recorder.record()
                    if content is not None:
                        _replace(self._folder / flight_recorder.FILE.format(self._rank), content)


_stacks: list[int] = []
"""Descriptor of this process's file of stacks."""


def _replace(file: Path, content: bytes) -> None:
    part = file.with_suffix(".part")
    with contextlib.suppress(OSError):
        part.write_bytes(content)
        part.rename(file)


def begin(rank: int, where: Callable[[], tuple[int | None, str]]) -> Heartbeat | None:
    """The heartbeat of a process that `megatron-wrap train` has started; else None."""
    folder = os.environ.get(LAUNCHER_FOLDER)
    return Heartbeat(Path(folder), rank, where) if folder else None
