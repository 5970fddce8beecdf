"""Gloo ranks, started once per world size and used by all tests of the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from _pools import pools

from megatron_wrap.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks(imported_for_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """ranks(world_size) -> a pool of that many ranks."""
    with pools(tmp_path_factory.mktemp("ranks"), "cpu") as of_size:
        yield of_size
