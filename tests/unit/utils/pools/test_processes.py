"""Processes that apply a function: order, errors, death and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_wrap.errors import DataError
from megatron_wrap.utils.pools.processes import ProcessPool

ROOT = Path(__file__).parents[3]


def is_running(process_id: int) -> bool:
    """Not ended; an ended process that nobody waited for is a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_the_order_of_the_items_and_few_are_read_ahead(count: int):
    read: list[int] = []

    def items():
        for number in range(40):
            read.append(number)
            yield number

    def slow(number: int) -> tuple[int, bytes]:
        time.sleep(0.001 * (number % 3))
        return os.getpid(), bytes(100_000 + number)

    with contextlib.closing(ProcessPool(slow, count)) as pool:
        for expected, (number, (process, content)) in enumerate(pool.map(items())):
            assert (number, len(content)) == (expected, 100_000 + expected)
            assert len(read) <= expected + 2 * count
            assert is_running(process)
    assert not is_running(process)


class Odd(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize(("error", "expected"), [(DataError("row 3"), DataError), (Odd(3, 4), RuntimeError)])
def test_an_error_is_raised_for_its_item(error: Exception, expected: type[Exception]):
    def fails(number: int) -> int:
        if number == 3:
            raise error
        return number

    with contextlib.closing(ProcessPool(fails, 2)) as pool:
        results = pool.map(range(9))
        assert [next(results) for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
        with pytest.raises(expected, match="3"):
            next(results)


@pytest.mark.parametrize("size", [1, 10_000_000])
def test_a_killed_process_is_one_error(size: int, monkeypatch: pytest.MonkeyPatch):
    """Also where it is killed while it sends a result, and others wait for it."""
    monkeypatch.setattr("megatron_wrap.utils.pools.processes._CHECK_SECONDS", 0.1)

    def content(number: int) -> bytes:
        if number == 2:
            process = os.fork()
            if process == 0:
                time.sleep(0.0 if size == 1 else 0.002)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            time.sleep(60 if size == 1 else 0)
        return bytes(size)

    with (
        contextlib.closing(ProcessPool(content, 2)) as pool,
        pytest.raises(DataError, match="a worker process was killed"),
    ):
        for _ in pool.map(range(5_000)):  # far more than the busiest machine computes until the signal
            pass


def test_processes_end_in_the_middle_of_an_item():
    begun = time.monotonic()
    pool = ProcessPool(lambda seconds: time.sleep(seconds), 2)
    results = pool.map([0, 60, 60, 60, 60])
    next(results)
    processes = [process.pid for process in pool._processes]
    pool.close()
    assert not any(map(is_running, processes))
    assert time.monotonic() - begun < 10


PROGRAM = """
import contextlib, os, signal, time
from megatron_wrap.utils.pools.processes import ProcessPool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with contextlib.closing(ProcessPool(lambda seconds: time.sleep(seconds) or os.getpid(), 2)) as pool:
    results = pool.map([0.1, 0.1, 60, 60, 60, 60])
    print(next(results)[1], next(results)[1], flush=True)
    next(results)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_their_parent(number: signal.Signals):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as parent:
        workers = [int(word) for word in parent.stdout.readline().split()]
        parent.send_signal(number)
        assert parent.wait(10) != 0
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, workers))
