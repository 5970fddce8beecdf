"""Threads of a rank: how many it may start, and a function whose results are computed ahead of their use."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
SWITCH_SECONDS = 0.0005


def threads_of_rank(most: int) -> int:
    """This rank's share of the processors of its host; at least 1, and at most `most`."""
    processors = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(most, processors))


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """A context in which a thread of this process that computes in Python releases Python's lock after 0.5 ms, by
    default 5 ms, if another thread waits for it. Threads that read, hash or copy in C need the lock briefly after each
    call."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def map_ahead(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    size_of: Callable[[Item], int] = lambda _: 0,
    most: int = 0,
) -> Iterator[tuple[Item, Result]]:
    """Each item and its result, in the order of the items. Meanwhile threads compute the results of the next items, as
    many as there are threads; one item is the caller's. An exception is raised in its item's turn, and ends the
    threads.

    Args:
        size_of: size of an item's result, such as its bytes.
        most: largest sum of the sizes that are computed ahead; a single result may be larger.
    """
    if threads == 1:
        for item in items:
            yield item, function(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            submitted = submitted_ahead(lambda item: pool.submit(function, item), items, threads, size_of, most)
            for item, future in submitted:
                yield item, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def submitted_ahead(
    submit: Callable[[Item], Future[Result]],
    items: Iterable[Item],
    ahead: int,
    size_of: Callable[[Item], int] = lambda _: 0,
    most: int = 0,
) -> Iterator[tuple[Item, Future[Result]]]:
    """Each item and its future, in the order of the items, after the next `ahead` items have been submitted, or as many
    as `most` allows; see `map_ahead` for `size_of` and `most`."""
    running: deque[tuple[Item, Future[Result]]] = deque()
    total = 0
    for item in items:
        size = size_of(item)
        while running and total + size > most:
            total -= size_of(running[0][0])
            yield running.popleft()
        running.append((item, submit(item)))
        total += size
        if len(running) > ahead:
            total -= size_of(running[0][0])
            yield running.popleft()
    yield from running
