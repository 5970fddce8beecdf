"""The tokenized cache: content, key, bad rows, concurrent writers, a writer that was killed."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import hashlib
import json
import math
import os
import pickle
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from megatron_wrap.data.cache import token_cache
from megatron_wrap.data.cache.token_cache import TokenCache, open_cache
from megatron_wrap.data.order.sample_reader import Preparation
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


def test_a_bad_row_raises_with_its_location_or_is_left_out(tmp_path: Path):
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


@dataclasses.dataclass(frozen=True)
class Tokens:
    ids: list[int]
    mask: tuple[float, ...] = ()


@dataclasses.dataclass(slots=True)
class Slots:
    count: int


class Pair(NamedTuple):
    chosen: Any
    rejected: Any


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the cache."""
    texts: list[str] = []
    monkeypatch.setattr(token_cache.logger, "warning_all_ranks", texts.append)
    return texts


def same(value: Any, decoded: Any) -> bool:
    """Whether pickles of both are equal, which contain types and bits."""
    return pickle.dumps(value) == pickle.dumps(decoded)


@pytest.mark.parametrize(
    "value",
    [
        {"text": "a\ud800\n", "none": None, "flags": [True, 1, 1.5], 3: -(2**70), (1, "b"): b"\0\xff"},
        {"ids": list(range(-5, 40)), "large": [2**70] * 9, "weights": [0.1, math.inf, -0.0] * 4, "set": {3}},
        Pair(Tokens([1, 2, 3] * 5, (0.5,)), {"nested": [Tokens([]), Slots(3)]}),
        {"date": datetime.datetime(2026, 1, 2, 3, 4, 5, 6), "price": decimal.Decimal("1.10"), "empty": ({}, [], ())},
        {"i": numpy.arange(6, dtype=numpy.int16).reshape(2, 3), "s": numpy.float32(0.1), "t": numpy.array(["a", "bc"])},
    ],
)
def test_a_stored_sample_is_the_same(value: Any):
    assert same(token_cache.sample_of_bytes(token_cache.sample_bytes(value)), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_a_stored_tensor_is_the_same(dtype: torch.dtype):
    for tensor in (torch.randn(2, 3).to(dtype), torch.ones(()).to(dtype), torch.empty(0, 4).to(dtype)):
        read = token_cache.sample_of_bytes(token_cache.sample_bytes([tensor]))[0]
        assert (read.dtype, read.shape) == (dtype, tensor.shape)
        assert torch.equal(read.float(), tensor.float())


def test_a_sample_that_cannot_be_stored_is_one_error(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"contains a .*Attack, which the tokenized cache cannot store.*cache_dir to null"
    ):
        opened(tmp_path, lambda row: {"square": 1, "object": Attack(tmp_path)})


@pytest.mark.parametrize("name", ["ends.npy", "lengths.npy", "length_ends.npy", "samples.bin", "complete.json"])
def test_a_cache_with_a_damaged_index_is_written_again(tmp_path: Path, name: str, warnings: list[str]):
    prepare = Counted(tmp_path)
    opened(tmp_path, prepare)
    (file,) = (tmp_path / "caches").glob(f"*/{name}")
    content = bytearray(file.read_bytes())
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if name.endswith(".npy") else content[:-20])
    for _ in range(2):
        cache = opened(tmp_path, prepare)
        assert [cache.get(row) for row in ROWS] == [{"square": row * row} for row in ROWS]
    assert prepare.count == 1200
    assert ["is damaged" in text for text in warnings] == [True]


@pytest.mark.parametrize("content", ["pickle", "objects", "floats"])
def test_a_foreign_index_runs_no_code_and_is_written_again(tmp_path: Path, content: str, warnings: list[str]):
    prepare, marker = Counted(tmp_path), tmp_path / "marker"
    opened(tmp_path, prepare)
    (record,) = (tmp_path / "caches").glob("*/complete.json")
    file = record.with_name("lengths.npy")
    if content == "pickle":
        file.write_bytes(pickle.dumps(Attack(marker)))
    elif content == "objects":
        numpy.save(file, numpy.array([Attack(marker)], dtype=object), allow_pickle=True)
    else:
        numpy.save(file, numpy.ones(600))
    recorded = json.loads(record.read_text())
    record.write_text(json.dumps({**recorded, file.name: hashlib.sha256(file.read_bytes()).hexdigest()}))
    assert opened(tmp_path, prepare).lengths(3) == (10, 2)
    assert ["is damaged" in text for text in warnings] == [True]
    record.write_text("[]")
    assert opened(tmp_path, prepare).lengths(3) == (10, 2)
    assert not marker.exists()


def test_a_damaged_sample_is_prepared_by_the_run_and_stored_by_the_next_one(tmp_path: Path, warnings: list[str]):
    prepare, marker = Counted(tmp_path), tmp_path / "marker"
    opened(tmp_path, prepare)
    (file,) = (tmp_path / "caches").glob("*/samples.bin")
    content = bytearray(file.read_bytes())
    attack = pickle.dumps(Attack(marker))
    content[: len(attack)] = attack  # as in the cache of an older version
    file.write_bytes(content)
    cache = opened(tmp_path, prepare)
    assert [cache.get(0), cache.get(0), cache.get(599)] == [None, None, {"square": 599 * 599}]
    assert ["is damaged" in text for text in warnings] == [True]
    assert opened(tmp_path, prepare).get(0) == {"square": 0}
    assert prepare.count == 1200
    assert len(warnings) == 2
    assert not marker.exists()
    assert not [path for path in (tmp_path / "caches").iterdir() if path.name.endswith(".partial")]


def test_a_class_that_is_named_in_a_sample_is_neither_imported_nor_called():
    calls = [("os", "system"), ("subprocess", "Popen"), ("antigravity", "x"), ("builtins", "dict")]
    for module, name in calls:
        structure = json.dumps({"object": [module, name, ["exit 1"]]}).encode()
        content = zlib.crc32(structure).to_bytes(4, "little") + len(structure).to_bytes(4, "little") + structure
        with pytest.raises(ValueError, match="is not the class that was stored"):
            token_cache.sample_of_bytes(content)
    assert "antigravity" not in sys.modules
