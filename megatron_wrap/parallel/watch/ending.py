"""How a process of a run ends, as it records it for the program that started it: an exit code alone may be that of a
flow or a library."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

LAUNCHER_FOLDER = "MEGATRON_WRAP_LAUNCHER_FOLDER"
"""Environment variable: folder in which the program that started this node's processes and they leave files."""
ENDING = "rank_{}.end"
"""Name of a rank's record there; on a full disk a link to nowhere, whose target is the exit code alone."""


def record_end(exit_code: int | None, message: str = "", traceback: str = "") -> None:
    """Record how this process is about to end; the last record counts. Without a launcher there is no record.

    Args:
        exit_code: that the run ends with: 0 after its last step and its saves, or the code of a stop, an interrupt or a
            user's error or of an exception; None: what the run called ends the process, with any code.
        message, traceback: of the error.
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
