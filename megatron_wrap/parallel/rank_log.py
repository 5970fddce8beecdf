"""Log files with the output of each process of a run, and their last lines."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from megatron_wrap.hidden_secrets import hide_secrets

VARIABLE = "MEGATRON_WRAP_LOGS"
"""Environment variable: folder of the logs."""
FILE = "rank_{}.log"
_HEADER = "---- rank {} of {}, process {} on {}, {} ----"
_OF_HEADER = re.compile(r"^---- rank \d+ of \d+, process .* ----$", re.M)
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TAIL_BYTES, _SHOWN_LINES = 64 * 2**10, 30


@contextlib.contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """Let the processes that are started inside write their logs into a folder."""
    os.environ[VARIABLE] = os.path.abspath(folder)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def begin(rank: int, world_size: int, keeps_console: bool) -> TextIO | None:
    """Append this process's output to its log, from now on until the process ends.

    Args:
        keeps_console: whether the output goes to the console as well; output of other languages than Python then goes
            to the console alone. False: all output goes to the file alone.

    Returns:
        The console's stderr if `keeps_console` is False, else None. Also None if VARIABLE is not set or its folder
        cannot be written; then nothing has changed.
    """
    folder = os.environ.get(VARIABLE)
    if not folder or isinstance(sys.stderr, _Copied):
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        log = Path(folder, FILE.format(rank)).open("ab", 0)  # noqa: SIM115
        time = datetime.now(UTC).isoformat(timespec="seconds")
        header = _HEADER.format(rank, world_size, os.getpid(), socket.gethostname(), time)
        log.write(f"{header}\n".encode())
    except OSError:
        return None
    if keeps_console:
        for redirect, stream in ((contextlib.redirect_stdout, sys.stdout), (contextlib.redirect_stderr, sys.stderr)):
            redirect(_Copied(stream, log)).__enter__()  # until the end of the process
        return None
    console = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    return console


class _Copied:
    """A text stream of the console, whose lines are also written to a file as far as its disk has room; progress bars,
    which a terminal overwrites, and colors are left out."""

    def __init__(self, console: TextIO, log: BinaryIO) -> None:
        self._console, self._log = console, log

    def write(self, text: str) -> int:
        """See `TextIO`."""
        written = self._console.write(text)
        if not text.startswith("\r") or text.endswith("\n"):
            with contextlib.suppress(OSError, ValueError):
                self._log.write(hide_secrets(_TERMINAL_CODE.sub("", text.lstrip("\r"))).encode("utf-8", "replace"))
        return written

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the console's stream."""
        return getattr(self._console, name)


def summary(folder: Path, rank: int) -> str:
    """The last lines that a rank has written since its start, below a line that names the rank; empty: there are
    none."""
    log = folder / FILE.format(rank)
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = _OF_HEADER.split(text)[-1].strip("\n").splitlines()[-_SHOWN_LINES:]
    return hide_secrets("\n".join([f"last lines of rank {rank} ({log}):", *lines, ""])) if lines else ""
