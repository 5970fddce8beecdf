"""Pools of ranks that a drill keeps from trial to trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_wrap.testing.ranks import RankPool, import_for_ranks


class RankPools:
    """One pool for each number of ranks, started by the first trial that needs it; `with` closes them."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __enter__(self) -> RankPools:
        import_for_ranks()
        return self

    def __exit__(self, *error: object) -> None:
        for pool in self._pools.values():
            pool.close()

    @contextlib.contextmanager
    def of(self, ranks: int) -> Iterator[RankPool]:
        """The pool of this number of ranks. An error closes it, so the next trial gets a new one."""
        pool = self._pools.pop(ranks, None) or RankPool(ranks, timeout_seconds=120)
        yield pool
        self._pools[ranks] = pool
