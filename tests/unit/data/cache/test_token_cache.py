"""The tokenized cache: content, key, bad rows, concurrent writers, a writer that was killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.data.cache.token_cache import TokenCache, open_cache
from megatron_wrap.data.order.usable_rows import Preparation
from megatron_wrap.data.sources.rows import ListedRows
from megatron_wrap.errors import DataError

ROWS = list(range(600))


class Counted:
    """Prepares a row as its square, and notes each call in a file."""

    def __init__(self, folder: Path, bad: tuple[int, ...] = (), seconds: float = 0.0) -> None:
        self.calls, self.bad, self.seconds = folder / "calls", bad, seconds

    def __call__(self, row: int) -> dict[str, int]:
        with self.calls.open("a") as file:
            print(row, file=file)
        time.sleep(self.seconds)
        if row in self.bad:
            raise DataError(f"{row} is bad")
        return {"square": row * row}

    @property
    def count(self) -> int:
        return len(self.calls.read_text().split()) if self.calls.exists() else 0


def opened(folder: Path, prepare: Any, key: Any = "a", **options: Any) -> TokenCache:
    preparation = Preparation(prepare, lambda sample: [sample["square"] + 1, 2][: 1 + sample["square"] % 2])
    return open_cache(str(folder / "caches"), {"key": key}, lambda: ListedRows(ROWS, "rows"), preparation, **options)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_cache_has_each_row_and_is_written_once_for_a_key(tmp_path: Path, processes: int):
    prepare = Counted(tmp_path)
    for _ in range(2):
        cache = opened(tmp_path, prepare, processes=processes)
        assert len(cache) == 600
        assert [cache.get(row) for row in ROWS] == [{"square": row * row} for row in ROWS]
        assert [cache.lengths(row) for row in (2, 3)] == [(5,), (10, 2)]
    assert prepare.count == 600
    opened(tmp_path, prepare, key="b", processes=processes)
    assert prepare.count == 1200
    names = [path.name for path in (tmp_path / "caches").iterdir()]
    assert len([name for name in names if not name.startswith(".")]) == 2
    assert not [name for name in names if name.endswith(".partial")]


def test_a_bad_row_raises_with_its_place_or_is_left_out(tmp_path: Path):
    prepare = Counted(tmp_path, bad=(7, 500))
    with pytest.raises(DataError, match=r"^rows:8: 7 is bad$"):
        opened(tmp_path, prepare)
    cache = opened(tmp_path, prepare, skip_bad=True)
    assert cache.get(8) == {"square": 64}
    assert cache.get(500) is cache.lengths(500) is None


def test_concurrent_processes_write_once_and_a_killed_one_leaves_nothing(tmp_path: Path):
    slow = Counted(tmp_path, seconds=0.001)

    def child() -> int:
        process = os.fork()
        if process == 0:
            try:
                os._exit(0 if opened(tmp_path, slow).get(599) == {"square": 599 * 599} else 1)
            finally:
                os._exit(2)
        return process

    killed = child()
    while slow.count < 50:
        time.sleep(0.01)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    before = slow.count
    assert [os.waitpid(process, 0)[1] for process in [child(), child(), child()]] == [0, 0, 0]
    assert slow.count == before + 600
    assert not [path for path in (tmp_path / "caches").iterdir() if path.name.endswith(".partial")]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "caches").write_text("a file")
    with pytest.raises(DataError, match=r"cache_dir .*caches: cannot be written"):
        opened(tmp_path, Counted(tmp_path))
