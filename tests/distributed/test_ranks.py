"""Ranks that fail: a pool says who and why, and a new one works."""

from __future__ import annotations

import os

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
    """One rank ends without a word."""
    if dist.get_rank() == rank:
        os._exit(3)
    return dist.get_rank()


def refuse(text: str) -> None:
    raise DataError(text)


def test_pools_beside_each_other_do_not_meet():
    pools = [RankPool(2) for _ in range(3)]
    assert [pool.run(total, addend) for addend, pool in enumerate(pools)] == [[1, 1], [3, 3], [5, 5]]
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named(rank):
    pool = RankPool(2)
    with pytest.raises(RankError, match=rf"--- rank {rank}\nthe process died"):
        pool.run(die, rank)
    assert pool.closed
    assert not any(process.is_alive() for process in pool._processes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_that_does_not_start_is_told():
    with pytest.raises(RankError, match="a process of 1 did not start"):
        RankPool(1, platform="cuda")


def test_a_user_s_mistake_is_told_apart():
    with pytest.raises(RankError) as caught:
        RankPool(2).run(refuse, "no such thing")
    assert caught.value.user_error == "no such thing"
    assert "refuse failed on 2 of 2 ranks" in str(caught.value)
