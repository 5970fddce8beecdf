"""Worker processes: order, tensors, errors, death and end."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_wrap.data.order import workers as workers_module
from megatron_wrap.data.order.workers import Workers, WorkerTraceback
from megatron_wrap.errors import DataError, TrainingError


def counted(worker: int, workers: int) -> Iterator[Any]:
    position = worker
    while True:
        yield {"position": position, "process": os.getpid(), "tensors": tensors(position)}
        position += workers


def tensors(position: int) -> list[torch.Tensor]:
    return [
        torch.full((position, 3), 1.5, dtype=torch.bfloat16),
        torch.arange(4).expand(2, -1),
        torch.arange(position) > 1,
        torch.tensor(2.5, dtype=torch.float64),
    ]


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("count", [1, 3])
def test_items_come_in_order_with_equal_tensors(count: int):
    workers = Workers(counted, count, ahead=4)
    items = [workers.next() for _ in range(7)]
    workers.close()
    assert [item["position"] for item in items] == list(range(7))
    assert len({item["process"] for item in items} - {os.getpid()}) == count
    for position, item in enumerate(items):
        for expected, actual in zip(tensors(position), item["tensors"], strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
            actual.zero_()  # they are writable
    assert not any(is_running(item["process"]) for item in items)


def test_no_more_than_the_bound_is_computed_ahead(tmp_path: Path):
    def noted(worker: int, workers: int) -> Iterator[int]:
        for position in range(100):
            (tmp_path / str(position)).touch()
            yield position

    workers = Workers(noted, 1, ahead=3)
    assert workers.next() == 0
    deadline = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)  # time for one too many
    assert len(list(tmp_path.iterdir())) == 4
    workers.close()


def test_an_error_is_raised_for_its_item_with_the_worker_s_traceback():
    def failing(worker: int, workers: int) -> Iterator[int]:
        yield 0
        yield 1
        raise DataError("train.jsonl:17: not JSON")

    workers = Workers(failing, 1, ahead=5)
    assert [workers.next(), workers.next()] == [0, 1]
    with pytest.raises(DataError, match=r"^train\.jsonl:17: not JSON$") as caught:
        workers.next()
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "in failing" in str(caught.value.__cause__)


def test_an_error_that_cannot_be_pickled_keeps_its_text():
    class Local(Exception):
        pass

    def failing(worker: int, workers: int) -> Iterator[int]:
        raise Local("odd")
        yield

    with pytest.raises(RuntimeError, match="Local: odd"):
        Workers(failing, 1, ahead=1).next()


def test_the_death_of_a_worker_is_one_error_that_names_the_signal():
    workers = Workers(counted, 2, ahead=2)
    first = workers.next()
    os.kill(first["process"], signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"worker process \d+ .*SIGKILL.*num_workers"):
        [workers.next() for _ in range(6)]


def test_a_worker_that_is_stopped_for_long_is_one_error_that_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers_module, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(workers_module, "_STOPPED_SECONDS", 0.2)
    workers = Workers(lambda worker, count: iter([os.getpid(), *["next"] * 9]), count=1, ahead=1)
    worker = workers.next()
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(TrainingError, match=rf"worker process {worker} of wrap\.batches has been stopped for .* s, by"):
        [workers.next() for _ in range(9)]
    assert not is_running(worker)


def test_workers_end_in_the_middle_of_an_item_and_without_a_call():
    def endless(worker: int, workers: int) -> Iterator[int]:
        yield os.getpid()
        time.sleep(100)

    started = time.monotonic()
    workers = Workers(endless, 1, ahead=2)
    first = workers.next()
    workers.close()
    dropped = Workers(endless, 1, ahead=2)
    second = dropped.next()
    del dropped
    gc.collect()
    assert not is_running(first)
    assert not is_running(second)
    assert time.monotonic() - started < 10


def test_workers_end_after_their_parent_is_killed():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        workers = Workers(counted, 2, ahead=2)
        os.write(write, f"{workers.next()['process']} {workers.next()['process']}\n".encode())
        time.sleep(100)
        os._exit(0)
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(read, 100)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    processes = [int(word) for word in line.split()]
    deadline = time.monotonic() + 10
    while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_alive(process) for process in processes)


def is_alive(process_id: int) -> bool:
    """Not ended; an ended process that nobody waited for is a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
