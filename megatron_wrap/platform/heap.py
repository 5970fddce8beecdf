"""Freed tensors' memory stays with a CPU process, as PyTorch's caching allocator keeps it on a GPU.

glibc gives large freed blocks back to the system, and each new tensor of some megabytes then pays for its pages again:
4,100 page faults, 15 to 25 ms of a step of 500 ms of the tiny Llama (`scripts/benchmark/overhead.yaml`).
"""

from __future__ import annotations

import ctypes
import os

# malloc.h; mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # of a 64-bit glibc (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX)
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, blocks of more than 32 MiB aside, until it ends.

    Returns:
        False where nothing was set: no glibc, or an environment variable of the user's speaks of its thresholds.
    """
    if any(name in os.environ for name in _USERS_OWN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM) and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
