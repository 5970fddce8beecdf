"""The log of a job on the console of the command that follows it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def show_from(log: Path, position: int) -> int:
    """Write what a file has after the first `position` bytes to stderr; returns the number of bytes shown so far."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(position)
        text = file.read()
        sys.stderr.buffer.write(text)
        sys.stderr.flush()
        position += len(text)
    return position
