"""Folders of derived files: written once by one of the processes that need them, verified when they are opened, and
written again if they are damaged.

A folder is written under another name and renamed when it is complete, so processes and runs may share its parent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from megatron_wrap.inside_folder import leaves_folder
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.file_lock import locked

COMPLETE = "complete.json"
"""Name of each other file -> its SHA-256, or its size in bytes; written last."""


def write_unless_complete(
    folder: Path,
    title: str,
    write: Callable[[Path], None],
    by_size: Collection[str] = (),
    check: Callable[[Path], str | None] = lambda _: None,
) -> None:
    """Write a folder unless it is complete. One of the calling processes does so, the others wait.

    Args:
        title: description of the folder for messages, such as "the index of ...".
        write: writes the files into a new folder.
        by_size: names of files of which the size alone is compared.
        check: returns any further damage of a folder, as text; it may raise an OSError or ValueError.

    Raises:
        OSError: it cannot be written.
    """
    if _damage(folder, check) is None:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f".{folder.name}.lock", f"writes {title}"):
        damage = _damage(folder, check)
        if damage is None:
            return
        partial = folder.parent / f".{folder.name}.{os.getpid()}.{os.uname().nodename}.partial"
        if folder.exists():
            logger.warning_all_ranks(f"{title} {folder} is damaged ({damage}); it is written again")
            folder.rename(partial)  # other processes may still read it
        for left in folder.parent.glob(f".{folder.name}.*.{os.uname().nodename}.partial"):  # also of killed processes
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        try:
            write(partial)
            record = {
                path.name: path.stat().st_size if path.name in by_size else _digest(path) for path in partial.iterdir()
            }
            (partial / COMPLETE).write_text(json.dumps(record), "utf-8")
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, without locks
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _damage(folder: Path, check: Callable[[Path], str | None]) -> str | None:
    """The reason why a folder cannot be used, as text; None if it can."""
    try:
        recorded = json.loads((folder / COMPLETE).read_text("utf-8"))
        if not isinstance(recorded, dict):
            return f"{COMPLETE} has no checksums"
        for name, expected in recorded.items():
            problem = leaves_folder(folder, name)
            if problem is not None:
                return f"{COMPLETE} {problem}"
            path = folder / name
            if expected != (path.stat().st_size if isinstance(expected, int) else _digest(path)):
                return f"{name} has changed"
        return check(folder)
    except (OSError, ValueError) as error:
        return str(error)


def _digest(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, mode="r").data).hexdigest()
