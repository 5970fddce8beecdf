"""Locks between processes: for files that one process writes and the others read, and for the folders of a run."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.utils.dist_logger import logger

_SILENT_SECONDS = 5.0
"""Seconds of waiting after which the wait is logged."""


@contextlib.contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock, and wait for it while another process does. A killed process holds no lock. On a file system without
    locks every process enters.

    Args:
        path: the lock's file, in a folder that exists.
        doing: what the holder does, for the message of a process that waits.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    with contextlib.suppress(OSError):
        try:
            lock.acquire(timeout=_SILENT_SECONDS)  # processes of one run often come at the same time
        except Timeout:
            logger.info_all_ranks(f"another process {doing} beside {path}; waiting for it")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


class FolderInUse(Exception):
    """Another process holds a folder; the message names the process."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone. A killed process holds none; on a file system without locks, or in a folder
    that cannot be written, nothing is held.

    Raises:
        FolderInUse: another process holds it.
    """
    from filelock import FileLock, Timeout

    lock, holder_file = FileLock(folder / ".run.lock"), folder / ".run.lock.holder"
    me = {"process": os.getpid(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
            since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
            holder_file.write_text(json.dumps({**me, "since": since}), encoding="utf-8")
        except Timeout:
            holder = {"process": "?", "host": "?", "since": "?"}
            with contextlib.suppress(OSError, ValueError, TypeError):
                holder |= json.loads(holder_file.read_text(encoding="utf-8"))
            if {key: holder[key] for key in me} != me:
                details = "process {process} on {host} since {since}".format_map(holder)
                raise FolderInUse(f"{folder} is in use by another run, {details}") from None
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                holder_file.unlink()
        lock.release()
