"""Ranks that fail: the error names the rank and the reason, and a new pool works. Ranks that wait are stopped."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_wrap.errors import DataError
from megatron_wrap.testing.ranks import RankError, RankPool


def total(addend: int) -> int:
    """The sum of addend + rank over all ranks."""
    tensor = torch.tensor(addend + dist.get_rank())
    dist.all_reduce(tensor)
    return int(tensor)


def die(rank: int) -> int:
    """One rank exits without an error."""
    if dist.get_rank() == rank:
        os._exit(3)
    return dist.get_rank()


def refuse(text: str) -> None:
    raise DataError(text)


def test_pools_are_independent():
    pools = [RankPool(2) for _ in range(3)]
    assert [pool.run(total, addend) for addend, pool in enumerate(pools)] == [[1, 1], [3, 3], [5, 5]]
    for pool in pools:
        pool.close()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are stopped on Linux")
def test_idle_ranks_are_stopped_and_end_with_the_process_that_started_them():
    def ended(process: psutil.Process) -> bool:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    theirs, mine = os.pipe()
    if (starter := os.fork()) == 0:
        pool = RankPool(2)
        pool.run(total, 0)
        os.write(mine, b" ".join(b"%d" % process.pid for process in pool._processes))
        signal.pause()
    ranks = [psutil.Process(int(rank)) for rank in os.read(theirs, 100).split()]
    wait_until(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks))
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    wait_until(lambda: all(map(ended, ranks)))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_the_error_names_a_rank_that_dies(rank):
    pool = RankPool(2)
    with pytest.raises(RankError, match=rf"rank {rank}\n.*died"):
        pool.run(die, rank)
    assert pool.closed
    assert not any(process.is_alive() for process in pool._processes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_that_does_not_start_is_an_error():
    with pytest.raises(RankError, match="did not start"):
        RankPool(1, platform="cuda")


def test_a_user_error_is_reported_separately():
    with pytest.raises(RankError) as caught:
        RankPool(2).run(refuse, "no such thing")
    assert caught.value.user_error == "no such thing"
    assert "refuse" in str(caught.value)
    assert "2 of 2 ranks" in str(caught.value)
