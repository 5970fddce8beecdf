"""Pools of ranks for a test session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_wrap.testing.ranks import RankPool


@contextmanager
def pools(folder: Path, platform: str) -> Iterator[Callable[[int], RankPool]]:
    """of_size(world_size) -> a pool of that many ranks; a new one if a failure closed the last. Their working directory
    is `folder`, because tests with two Megatron-Core versions may run at the same time and write to `outputs`."""
    made: dict[int, RankPool] = {}
    here = os.getcwd()

    def of_size(world_size: int) -> RankPool:
        if world_size not in made or made[world_size].closed:
            os.chdir(folder)
            try:
                made[world_size] = RankPool(world_size, platform=platform)
            finally:
                os.chdir(here)
        return made[world_size]

    try:
        yield of_size
    finally:
        for pool in made.values():
            pool.close()
