"""Gloo ranks, started once per world size and used by all tests of the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from _checkpoint_runs import warm_up

from megatron_wrap.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """ranks(world_size) -> a pool of that many ranks; a new one after a failure has closed the last. They work in a
    folder of their own: the tests may run on two Megatron-Cores at the same time, and records go to `outputs`."""
    warm_up()  # what the parent has imported, forked ranks need not
    pools: dict[int, RankPool] = {}
    folder, here = tmp_path_factory.mktemp("ranks"), os.getcwd()

    def of_size(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or pool._connections[0].closed:
            os.chdir(folder)
            try:
                pool = pools[world_size] = RankPool(world_size)
            finally:
                os.chdir(here)
        return pool

    yield of_size
    for pool in pools.values():
        pool.close()
