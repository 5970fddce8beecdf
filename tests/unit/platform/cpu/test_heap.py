"""Freed memory stays in the process: counts the page faults of temporary tensors."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from megatron_wrap.platform.cpu.platform import keep_freed_memory

def step():
    parts = [torch.ones(4 * 2**20) for _ in range(3)]  # 16 MiB each
    return sum(part.sum() for part in parts)

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
    is_set, faults = measured()
    assert is_set
    assert faults < 1000  # 3 x 4,096 pages are touched


def test_malloc_thresholds_of_the_user_are_kept():
    assert measured(MALLOC_TRIM_THRESHOLD_="131072") == (0, pytest.approx(12288, rel=0.2))
