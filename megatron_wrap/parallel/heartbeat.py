"""A process of a run says every second that it runs, and where it is, to the program that started it."""

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

from megatron_wrap.parallel.stop_requests import LAUNCHER_FOLDER

HEARTBEAT, STACKS = "rank_{}.json", "rank_{}.stacks"
"""Names of a rank's files in the launcher's folder."""
STACKS_SIGNAL = signal.SIGUSR2
"""Lets a process write the stacks of all its threads."""
_SECONDS = 1.0


class Heartbeat:
    """Writes this process's state every second, in a thread.

    Args:
        folder: of the launcher.
        rank: global rank of this process.
        where: returns the iteration under way, or None before the first, and the phase.
    """

    def __init__(self, folder: Path, rank: int, where: Callable[[], tuple[int | None, str]]) -> None:
        self._file, self._where = folder / HEARTBEAT.format(rank), where
        self._facts = {"rank": rank, "process": os.getpid(), "host": socket.gethostname()}
        self._ends = threading.Event()
        self._stacks = None
        with contextlib.suppress(OSError):
            self._stacks = (folder / STACKS.format(rank)).open("w", encoding="utf-8")
            if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
                faulthandler.register(STACKS_SIGNAL, file=self._stacks)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """End the thread; the last state stays."""
        self._ends.set()
        if self._stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self._stacks.close()
            self._stacks = None

    def _beat(self) -> None:
        while True:
            iteration, phase = self._where()
            part = self._file.with_suffix(".part")
            with contextlib.suppress(OSError):
                part.write_text(json.dumps({**self._facts, "iteration": iteration, "phase": phase}), encoding="utf-8")
                part.rename(self._file)
            if self._ends.wait(_SECONDS):
                return


def begin(rank: int, where: Callable[[], tuple[int | None, str]]) -> Heartbeat | None:
    """The heartbeat of a process that `megatron-wrap train` has started; else None."""
    folder = os.environ.get(LAUNCHER_FOLDER)
    return Heartbeat(Path(folder), rank, where) if folder else None
