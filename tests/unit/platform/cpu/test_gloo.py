"""Gloo groups share a device, whose thread gives way to others: the threads of a process with several groups."""

import os

import pytest
from _forked import run_forked

pytestmark = pytest.mark.process_group

GROUPS = """
import datetime, os, torch
import torch.distributed as dist
from megatron_wrap.platform import choose_platform
from megatron_wrap.platform.base.platform import Replacements
from megatron_wrap.platform.cpu.platform import share_device

def threads_of(make):
    before = len(os.listdir("/proc/self/task"))
    return make(), len(os.listdir("/proc/self/task")) - before

choose_platform("cpu").uninstall()  # another test may have installed it, which shares the device
replacements, theirs = Replacements(), dist.distributed_c10d.ProcessGroupGloo
share_device(replacements)
store, seconds = dist.HashStore(), datetime.timedelta(seconds=7)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
priorities = {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
assert priorities == {os.SCHED_OTHER, os.SCHED_BATCH}, priorities
assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == (os.SCHED_OTHER, 0)
made = [threads_of(lambda: dist.new_group([0], timeout=seconds)) for _ in range(4)]
for group, _ in made:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [1, 1, 1]
backend = made[0][0]._get_backend(torch.device("cpu"))
assert type(backend) is theirs and isinstance(backend, dist.distributed_c10d.ProcessGroupGloo)
assert backend.options._timeout == seconds
other = threads_of(lambda: dist.distributed_c10d.ProcessGroupGloo(dist.PrefixStore("other", store), 0, 1))
replacements.close()
assert dist.distributed_c10d.ProcessGroupGloo is theirs
own = threads_of(lambda: dist.new_group([0]))
print(*(count for _, count in [*made, other, own]), flush=True)
"""


def threads(**variables: str) -> list[int]:
    """Threads that each group starts: four groups that share the default group's device, then two with their own device
    (one created with other arguments, one created after `undo`)."""
    done = run_forked(GROUPS, variables=variables)
    assert done.returncode == 0, done.stderr
    return [int(count) for count in done.stdout.split()]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_groups_share_one_device_until_undo_whose_thread_gives_way():
    workers, workers_and_loop = 2, 3
    for variables in ({}, {"GLOO_SOCKET_IFNAME": "lo"}):
        assert threads(**variables) == [*[workers] * 4, workers_and_loop, workers_and_loop]
