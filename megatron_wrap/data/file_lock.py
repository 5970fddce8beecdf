"""A lock between the processes of a machine, for what one of them writes and the others read."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.utils.dist_logger import logger


@contextlib.contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock that ends with this process. A file system without locks has none, and then each process enters.

    Args:
        path: the lock's file, in a folder that exists.
        doing: what its holder does, for the message of a process that waits.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info_all_ranks(f"another process {doing} beside {path}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
