"""A lock between the processes of a machine, for what one of them writes and the others read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.utils.dist_logger import logger


@contextlib.contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock, and wait for it while another process does. A killed process holds none. On a file system without
    locks every process enters.

    Args:
        path: the lock's file, in a folder that exists.
        doing: what the holder does, for the message of a process that waits.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    with contextlib.suppress(OSError):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info_all_ranks(f"another process {doing} beside {path}; waiting for it")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()
