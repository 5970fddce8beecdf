"""Record of how a process of a run ends, for the program that started it: an exit code alone may come from a flow or a
library."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

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
