"""Prepared samples of one source on disk, with their lengths: written once, read by row in constant time.

A cache is a folder named by a hash of everything that its content depends on. It is written under another name and
renamed when it is complete, so processes and runs may share a parent folder. Nothing in it is executed when it is
read. A damaged cache is written again: its small files are compared with their SHA-256 when it is opened, and each
sample with its CRC-32 when it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_wrap.data.cache import sample_codec
from megatron_wrap.data.order.usable_rows import Preparation
from megatron_wrap.data.sources.rows import BadSample, Rows, converted
from megatron_wrap.errors import DataError
from megatron_wrap.utils.atomic_write import named_write_errors
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.file_lock import locked
from megatron_wrap.utils.pools.processes import ProcessPool
from megatron_wrap.utils.progress import tracked

_FORMAT = 2
"""1: pickled samples, which are not read."""
_CHUNK = 64
"""Rows that a process prepares at a time."""
_KEY, _SAMPLES, _ENDS, _LENGTHS, _LENGTH_ENDS = "key.json", "samples.bin", "ends.npy", "lengths.npy", "length_ends.npy"
_COMPLETE = "complete.json"
"""The size of the samples' file and the SHA-256 of the others."""


class Entry(NamedTuple):
    """One prepared sample; the default is that of a row that cannot be used."""

    content: bytes = b""
    """The sample, see `sample_codec`."""
    lengths: tuple[int, ...] = ()
    """Tokens of each of its sequences."""


class TokenCache:
    """Reads a cache; forked processes may share an object.

    Args:
        folder: of a complete cache.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_damaged = folder, False
        self._ends = np.load(folder / _ENDS, mmap_mode="r")
        self._lengths = np.load(folder / _LENGTHS, mmap_mode="r")
        self._length_ends = np.load(folder / _LENGTH_ENDS, mmap_mode="r")
        self._samples = os.open(folder / _SAMPLES, os.O_RDONLY)
        weakref.finalize(self, os.close, self._samples)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def get(self, row: int) -> Any:
        """The prepared sample of a row; None if the row cannot be used, or its sample is damaged. The next run then
        writes the cache again."""
        begin, end = int(self._ends[row]), int(self._ends[row + 1])
        if begin == end:
            return None
        try:
            return sample_codec.decode(os.pread(self._samples, end - begin, begin))
        except (OSError, ValueError) as error:
            self._report(error)
            return None

    def _report(self, error: Exception) -> None:
        if self._is_damaged:
            return
        self._is_damaged = True
        logger.warning_all_ranks(
            f"the tokenized cache {self._folder} is damaged ({error}); its damaged samples are prepared again, and the "
            "next run writes the cache again"
        )
        with contextlib.suppress(OSError):  # of another user, or done by another process
            (self._folder / _COMPLETE).unlink()

    def lengths(self, row: int) -> tuple[int, ...] | None:
        """Tokens of each sequence of a row's sample; None if the row cannot be used."""
        begin, end = int(self._length_ends[row]), int(self._length_ends[row + 1])
        return None if self._ends[row] == self._ends[row + 1] else tuple(self._lengths[begin:end].tolist())


def open_cache(
    parent: str,
    key: Mapping[str, Any],
    rows: Callable[[], Rows],
    preparation: Preparation,
    skip_bad: bool = False,
    processes: int = 1,
) -> TokenCache:
    """Open the cache of a source. If there is none, one of the calling processes writes it, and the others wait.

    Args:
        parent: folder of caches.
        key: everything that the content depends on, as plain values.
        rows: opens the source.
        preparation: of the run's flow.
        skip_bad: leave out rows that cannot be used; False: they raise.
        processes: number of processes that prepare samples.

    Raises:
        DataError: a row cannot be used, with its file and row; a prepared sample cannot be stored; or the folder cannot
            be written.
    """
    name = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True, default=str).encode()).hexdigest()[:32]
    folder = Path(parent).expanduser() / name
    if _damage(folder) is not None:
        with named_write_errors(f"megatron_wrap.data.cache_dir {parent}", "give another folder, or null", DataError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.parent / f".{name}.lock", "writes the tokenized cache"):
                damage = _damage(folder)
                if damage is not None:
                    if folder.is_dir():
                        logger.warning_all_ranks(f"the tokenized cache {folder} is damaged ({damage}); written again")
                        _remove(folder)
                    _remove_leftovers(folder)
                    _write(folder, key, rows(), preparation, skip_bad, processes)
    return TokenCache(folder)


def _damage(folder: Path) -> str | None:
    """Why a cache cannot be used, as text; None if it can."""
    try:
        recorded = json.loads((folder / _COMPLETE).read_text("utf-8"))
        actual = _record(folder)
        changed = next((name for name in actual if actual[name] != recorded.get(name)), None)
        return f"{changed} has changed" if changed is not None else _wrong_arrays(folder)
    except (OSError, ValueError, AttributeError) as error:
        return str(error)


def _wrong_arrays(folder: Path) -> str | None:
    """Which array is not one that a cache has, as text; None if each is."""
    arrays = {}
    for name, dtype in ((_ENDS, np.int64), (_LENGTHS, np.int32), (_LENGTH_ENDS, np.int64)):
        array = arrays[name] = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            return f"{name} is not an array of {np.dtype(dtype).name}"
    return None if len(arrays[_ENDS]) == len(arrays[_LENGTH_ENDS]) else f"{_LENGTH_ENDS} has another length"


def _record(folder: Path) -> dict[str, Any]:
    """What `complete.json` contains."""
    digests = {
        name: hashlib.sha256(np.memmap(folder / name, mode="r").data).hexdigest()
        for name in (_ENDS, _LENGTHS, _LENGTH_ENDS)
    }
    return {**digests, _SAMPLES: (folder / _SAMPLES).stat().st_size}


def _remove(folder: Path) -> None:
    """Remove a damaged cache, which other processes may still read."""
    hidden = folder.parent / f".{folder.name}.{os.getpid()}.{os.uname().nodename}.partial"
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove partial folders of the same cache from killed processes of this machine."""
    for left in folder.parent.glob(f".{folder.name}.*.{os.uname().nodename}.partial"):
        shutil.rmtree(left, ignore_errors=True)


def _write(
    folder: Path, key: Mapping[str, Any], rows: Rows, preparation: Preparation, skip_bad: bool, processes: int
) -> None:
    partial = folder.parent / f".{folder.name}.{os.getpid()}.{os.uname().nodename}.partial"
    partial.mkdir()
    try:
        _write_content(partial, rows, _entries(rows, preparation, skip_bad, processes))
        (partial / _KEY).write_text(json.dumps(key, indent=1, sort_keys=True, default=str) + "\n", "utf-8")
        (partial / _COMPLETE).write_text(json.dumps(_record(partial)), "utf-8")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_content(folder: Path, rows: Rows, entries: Iterator[Entry]) -> None:
    ends, length_ends, lengths = array("q", [0]), array("q", [0]), array("i")
    work = f"tokenizing into {folder.parent}"
    with (folder / _SAMPLES).open("wb") as file:
        for entry in tracked(entries, work, len(rows), "sample", any_rank=True):
            file.write(entry.content)
            ends.append(ends[-1] + len(entry.content))
            lengths.extend(entry.lengths)
            length_ends.append(len(lengths))
    np.save(folder / _ENDS, np.frombuffer(ends, dtype=np.int64))
    np.save(folder / _LENGTH_ENDS, np.frombuffer(length_ends, dtype=np.int64))
    np.save(folder / _LENGTHS, np.array(lengths, dtype=np.int32))


def _entries(rows: Rows, preparation: Preparation, skip_bad: bool, processes: int) -> Iterator[Entry]:
    """The entry of each row, in order."""
    chunks = [range(begin, min(begin + _CHUNK, len(rows))) for begin in range(0, len(rows), _CHUNK)]

    def prepared(chunk: range) -> list[Entry]:
        return [_entry(rows, row, preparation, skip_bad) for row in chunk]

    def prepared_in_one_thread(chunk: range) -> list[Entry]:
        torch.set_num_threads(1)  # the threads of the parent were not forked
        return prepared(chunk)

    if processes <= 1 or len(chunks) == 1:
        yield from chain.from_iterable(map(prepared, chunks))
        return
    with contextlib.closing(ProcessPool(prepared_in_one_thread, min(processes, len(chunks)))) as pool:
        for _, entries in pool.map(chunks):
            yield from entries


def _entry(rows: Rows, row: int, preparation: Preparation, skip_bad: bool) -> Entry:
    try:
        prepared = converted(preparation.prepare, rows[row], lambda: rows.where(row))
        lengths: Sequence[int] = converted(preparation.lengths, prepared, lambda: rows.where(row))
    except BadSample:
        if not skip_bad:
            raise
        return Entry()
    return Entry(sample_codec.encode(prepared), tuple(lengths))
