"""Freed memory stays in the process: counts the page faults of the memory of temporary tensors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from megatron_wrap.platform.cpu.heap import keep_freed_memory

libc = ctypes.CDLL(None)

def step():  # memory of three tensors, allocated as torch does (c10/core/impl/alloc_cpu.cpp)
    parts = [ctypes.c_void_p() for _ in range(3)]
    for part in parts:
        assert libc.posix_memalign(ctypes.byref(part), 64, 2**24) == 0
        ctypes.memset(part, 1, 2**24)
    for part in parts:
        libc.free(part)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

set_ = keep_freed_memory()
for _ in range(3):
    step()
print(int(set_), min(faults() for _ in range(3)))
"""


def measured(**variables: str) -> tuple[int, int]:
    removed = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if name not in removed} | variables
    done = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    is_set, faults = done.stdout.split()
    return int(is_set), int(faults)


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="mallopt is glibc's")
def test_temporary_tensors_cause_no_page_faults():
    for _ in range(3):  # where a process has its heap is random, and a block may have no room there
        is_set, faults = measured()
        assert is_set
        if faults < 1000:
            return
    pytest.fail(f"{faults} page faults in each of three processes; 3 x 4,096 pages are touched")


def test_malloc_thresholds_of_the_user_are_kept():
    assert measured(MALLOC_TRIM_THRESHOLD_="131072") == (0, pytest.approx(12288, rel=0.2))
