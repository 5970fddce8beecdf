"""A process of a run reports every second that it runs, and where it is, to the program that started it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_wrap.metrics.phases import num_changes
from megatron_wrap.parallel.watch import flight_recorder
from megatron_wrap.parallel.watch.stop_requests import LAUNCHER_FOLDER

HEARTBEAT, STACKS = "rank_{}.json", "rank_{}.stacks"
"""Names of a rank's files in the launcher's folder."""
STACKS_SIGNAL = signal.SIGUSR2
"""Lets a process write the stacks of all its threads, whatever it does."""
COLLECTIVES_REQUEST = "collectives"
"""While the launcher's folder has a file of this name, each process writes once what its flight recorder has."""
_SECONDS, _REQUEST_SECONDS = 1.0, 0.2


class Heartbeat:
    """Writes this process's state every second, in a thread.

    Args:
        folder: of the launcher.
        rank: global rank of this process.
        where: returns the iteration under way, or None before the first, and the phase.
    """

    def __init__(self, folder: Path, rank: int, where: Callable[[], tuple[int | None, str]]) -> None:
        self._folder, self._rank, self._where = folder, rank, where
        self._facts = {"rank": rank, "process": os.getpid(), "host": socket.gethostname()}
        self._ends = threading.Event()
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
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """End the thread; the last state stays."""
        self._ends.set()

    def _beat(self) -> None:
        file, is_recorded = self._folder / HEARTBEAT.format(self._rank), False
        while True:
            iteration, phase = self._where()
            state = {**self._facts, "iteration": iteration, "phase": phase, "progress": num_changes()}
            _replace(file, json.dumps(state).encode())
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
