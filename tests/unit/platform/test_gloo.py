"""Gloo groups share a device: seen in the threads of a process with several groups, which still compute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

GROUPS = """
import collections, datetime, os, torch
import torch.distributed as dist
from pathlib import Path
from megatron_wrap.platform.base import Replacements
from megatron_wrap.platform.gloo import share_device

def threads():
    names = [Path("/proc/self/task", task, "comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return collections.Counter(names)["gloo_tcp_loop"]

replacements, theirs = Replacements(), dist.distributed_c10d.ProcessGroupGloo
share_device(replacements)
store, seconds = dist.HashStore(), datetime.timedelta(seconds=7)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
groups = [dist.new_group([0], timeout=seconds) for _ in range(4)]
shared = threads()
for group in groups:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [1, 1, 1]
backend = groups[0]._get_backend(torch.device("cpu"))
assert type(backend) is theirs and isinstance(backend, dist.distributed_c10d.ProcessGroupGloo)
assert backend.options._timeout == seconds
replacements.undo()
assert dist.distributed_c10d.ProcessGroupGloo is theirs
own = dist.new_group([0])
print(shared, threads(), flush=True)
os._exit(0)
"""


def loops(**variables: str) -> list[int]:
    """Threads that wait for sockets with five groups on a shared device, and with one more on a device of its own."""
    done = subprocess.run(
        [sys.executable, "-c", GROUPS], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [int(count) for count in done.stdout.split()]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_groups_share_one_device_until_it_is_undone():
    assert loops() == [1, 2]
    assert loops(GLOO_SOCKET_IFNAME="lo") == [1, 2]
