"""Gloo ranks, started once per world size and used by all tests of the session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _pools import pools

from megatron_wrap.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks(imported_for_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """ranks(world_size) -> a pool of that many ranks."""
    with pools(tmp_path_factory.mktemp("ranks"), "cpu") as of_size:
        yield of_size


@pytest.fixture(scope="module")
def on_one_rank(ranks: Callable[[int], RankPool]) -> Callable[..., Any]:
    """on_one_rank(function, *arguments) -> its result on one rank; the tests of a module share equal calls."""
    return functools.cache(lambda function, *arguments: ranks(1).run(function, *arguments)[0])
