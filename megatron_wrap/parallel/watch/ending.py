"""End of a process of a run: its record for the program that started it, because an exit code alone may come from a
flow or a library; and Ctrl-C, one KeyboardInterrupt, also where the main thread waits for the device."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

LAUNCHER_FOLDER = "MEGATRON_WRAP_LAUNCHER_FOLDER"
"""Environment variable: folder for files between this node's processes and the program that started them."""
ENDING = "rank_{}.end"
"""Name of a rank's record in that folder; on a full disk a symbolic link, whose target is the text of the exit code
alone."""


def record_end(exit_code: int | None, message: str = "", traceback: str = "") -> None:
    """Record how this process is about to end; the last record counts. Without a launcher there is no record.

    Args:
        exit_code: exit code of the run: 0 after its last step and its saves, or the code of a stop, an interrupt, a
            user's error or an exception; None: code that the run called ends the process, with any exit code.
        message, traceback: message and traceback of the error.
    """
    folder = os.environ.get(LAUNCHER_FOLDER)
    if not folder:
        return
    file = Path(folder, ENDING.format(os.environ.get("RANK", "0")))
    content = {"exit_code": exit_code, "message": message, "traceback": traceback, "time": time.time()}
    part = file.with_suffix(".end-part")
    with contextlib.suppress(OSError):
        try:
            part.write_text(json.dumps(content), encoding="utf-8")
        except OSError:
            part.unlink(missing_ok=True)
            part.symlink_to(json.dumps(exit_code))  # needs no block of the disk
        part.rename(file)


INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that Ctrl-C has ended, as in a shell."""
RESUME = 75
"""Exit code of a run that SIGTERM or SIGUSR1 has ended: the same command continues it. EX_TEMPFAIL of sysexits.h."""
REPEATED_SECONDS = 1.0
"""Seconds within which a repeated signal is the same request: both the terminal and the program that started the
processes send it to each process."""
_ORPHAN_SECONDS = 60.0
"""Seconds that a process has for its step and a save after the death of the program that started it."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of SIGINT: ends what the process does, and ignores further ones."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Ignore SIGINT after the first one: after the terminal has sent it to every process, torchrun's agent sends it to
    the ranks once more."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class InterruptWatch:
    """Ends this process some seconds after Ctrl-C where its main thread cannot: it may wait on the device for a rank
    that has ended. It also ends this process some time after the death of the process that started it. Create it in the
    main thread.

    Args:
        sentence: function that returns the printed sentence.
        prints: whether this process prints it.
        seconds: time for the main thread to react, by a call of `close`.
    """

    def __init__(self, sentence: Callable[[], str], prints: bool = True, seconds: float = 10.0) -> None:
        self._sentence, self._prints, self._seconds = sentence, prints, seconds
        self._first_is_a_request = False
        self._first: float | None = None
        self._parent = os.getppid()
        self._reacted = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()

    def first_is_a_request(self, is_request: bool) -> None:
        """Set whether the first SIGINT is only a request: the main thread reacts after its step, and this watch does
        not end the process."""
        self._first_is_a_request = is_request

    def close(self) -> None:
        """End the watch; a second call does nothing."""
        if not self._reacted.is_set():
            self._reacted.set()
            signal.set_wakeup_fd(self._before)
            self._writer.close()

    def _watch(self) -> None:
        with self._reader:
            while numbers := self._reader.recv(16):  # empty after `close`
                is_orphan = signal.SIGTERM in numbers and os.getppid() != self._parent
                if not is_orphan and not (signal.SIGINT in numbers and self._ends()):
                    continue
                if not self._reacted.wait(_ORPHAN_SECONDS if is_orphan else self._seconds):
                    if self._prints and not is_orphan:
                        print(self._sentence(), file=sys.stderr, flush=True)  # noqa: T201
                    code = RESUME if is_orphan else INTERRUPTED
                    record_end(code)
                    os._exit(code)

    def _ends(self) -> bool:
        """Whether a SIGINT that has just come ends the process."""
        now = time.monotonic()
        if not self._first_is_a_request:
            return True
        if self._first is None:
            self._first = now
        return now - self._first > REPEATED_SECONDS
