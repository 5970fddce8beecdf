"""Keep the memory of freed CPU tensors in the process, like PyTorch's caching allocator on a GPU.

glibc returns large freed blocks to the operating system, so each new tensor of a few megabytes causes page faults:
4,100 of them, 15 to 25 ms of a 500 ms step of the tiny Llama (`scripts/benchmark/overhead.yaml`).
"""

from __future__ import annotations

import ctypes
import os

# malloc.h; mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # limit of 64-bit glibc (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX)
_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed memory in this process until it exits, except blocks larger than 32 MiB.

    Returns:
        False if nothing was set: no glibc, or the user sets malloc thresholds in the environment.
    """
    if any(name in os.environ for name in _USER_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM) and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
