"""Results of threads come in the order of the items; an exception comes in its turn."""

import contextlib
import sys
import threading

import pytest

from megatron_wrap.utils.pools.threads import map_ahead, switching_often, threads_of_rank


def test_threads_of_a_rank_are_its_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert threads_of_rank(8) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (threads_of_rank(8), threads_of_rank(2)) == (4, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert threads_of_rank(8) == 1


def test_items_are_computed_ahead_in_order() -> None:
    second = threading.Event()

    def compute(item: int) -> int:
        if item == 1:
            second.set()
        elif item == 0:
            assert second.wait(10)  # only another thread can set it before this result is used
        return item * item

    assert list(map_ahead(compute, range(9), threads=3)) == [(item, item * item) for item in range(9)]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_exception_comes_in_its_turn(threads: int) -> None:
    results = map_ahead(lambda item: 6 // (3 - item), range(9), threads)
    assert [next(results) for _ in range(3)] == [(0, 2), (1, 3), (2, 6)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert [thread.name for thread in threading.enumerate() if "ThreadPool" in thread.name] == []


def test_results_that_are_computed_ahead_are_limited_by_their_size() -> None:
    begun: list[int] = []
    sizes = [4, 4, 9, 1, 1, 1]

    def compute(item: int) -> int:
        begun.append(item)
        return item

    results = map_ahead(compute, range(6), 3, size_of=lambda item: sizes[item], most=8)
    most_ahead = []
    for item, _ in results:
        most_ahead.append(sum(sizes[other] for other in begun if other > item))
    assert max(most_ahead) <= 9  # the largest one alone
    assert sorted(begun) == list(range(6))


def test_the_switch_interval_is_that_of_before_after_an_error() -> None:
    before = sys.getswitchinterval()
    with contextlib.suppress(KeyError), switching_often():
        assert sys.getswitchinterval() < before
        raise KeyError
    assert sys.getswitchinterval() == before
