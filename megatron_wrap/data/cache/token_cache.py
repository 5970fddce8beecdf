"""Prepared samples of one source on disk, with their lengths: written once, read by row in constant time.

A cache is a folder named by a hash of everything that its content depends on. Nothing in it is executed when it is
read. Its small files are compared with their SHA-256 when it is opened, each sample with its CRC-32 when it is read.

A sample is JSON for the structure and raw bytes for numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import hashlib
import json
import os
import struct
import sys
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_wrap.data.cache.verified_folder import COMPLETE, write_unless_complete
from megatron_wrap.data.order.sample_reader import Preparation
from megatron_wrap.data.sources.rows import BadSample, Rows, converted
from megatron_wrap.errors import DataError
from megatron_wrap.utils.atomic_write import named_write_errors
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.pools.processes import ProcessPool
from megatron_wrap.utils.progress import tracked

_FORMAT = 2
_CHUNK = 64
"""Rows that a process prepares at a time."""
_KEY, _SAMPLES, _ENDS, _LENGTHS, _LENGTH_ENDS = "key.json", "samples.bin", "ends.npy", "lengths.npy", "length_ends.npy"


class Entry(NamedTuple):
    """One prepared sample; the default stands for a row that cannot be used."""

    content: bytes = b""
    """Encoded sample, see `sample_bytes`; empty for a row that cannot be used."""
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
            return sample_of_bytes(os.pread(self._samples, end - begin, begin))
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
            (self._folder / COMPLETE).unlink()

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

    def write(partial: Path) -> None:
        opened = rows()
        _write_content(partial, opened, _entries(opened, preparation, skip_bad, processes))
        (partial / _KEY).write_text(json.dumps(key, indent=1, sort_keys=True, default=str) + "\n", "utf-8")

    with named_write_errors(f"megatron_wrap.data.cache_dir {parent}", "give another folder, or null", DataError):
        write_unless_complete(folder, "the tokenized cache", write, by_size=(_SAMPLES,), check=_wrong_arrays)
    return TokenCache(folder)


def _wrong_arrays(folder: Path) -> str | None:
    """The problem of an array that does not have the form of a cache's, as text; None if all have it."""
    arrays = {}
    for name, dtype in ((_ENDS, np.int64), (_LENGTHS, np.int32), (_LENGTH_ENDS, np.int64)):
        array = arrays[name] = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            return f"{name} is not an array of {np.dtype(dtype).name}"
    return None if len(arrays[_ENDS]) == len(arrays[_LENGTH_ENDS]) else f"{_LENGTH_ENDS} has another length"


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
    return Entry(sample_bytes(prepared), tuple(lengths))


_HEAD = struct.Struct("<II")
"""Header of an encoded sample: the CRC-32 of everything after these eight bytes, and the length of the JSON. The
numbers follow the JSON."""
_MANY = 8
"""Smallest length of a list that is stored as an array."""
_KINDS = "biufcSUMm"
"""Kinds of numpy's dtypes that contain no Python objects."""


def sample_bytes(sample: Any) -> bytes:
    """A sample of plain values, dates, arrays, tensors, and dataclasses or named tuples of these.

    Raises:
        DataError: it contains anything else.
    """
    numbers = bytearray()
    structure = json.dumps(_encoded(sample, numbers), separators=(",", ":")).encode()
    content = structure + numbers
    return _HEAD.pack(zlib.crc32(content), len(structure)) + content


def sample_of_bytes(content: bytes) -> Any:
    """The sample that was passed to `sample_bytes`.

    Raises:
        ValueError: the bytes are damaged.
    """
    if len(content) < _HEAD.size:
        raise ValueError("truncated")
    checksum, length = _HEAD.unpack_from(content)
    body = content[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        raise ValueError("another checksum")
    try:
        return _decoded(json.loads(body[:length]), memoryview(body)[length:])
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _encoded(value: Any, numbers: bytearray) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return _encoded_list(value, numbers)
    tag = next((tag for owner, tag in _CONTAINERS.items() if kind is owner), None)
    if tag is not None:
        return {tag: [_encoded(item, numbers) for item in value]}
    if kind is dict:
        return {"dict": [[_encoded(key, numbers), _encoded(item, numbers)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: _stored(bytes(value), numbers)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS and value.dtype.names is None:
        array = np.asarray(value)
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        return {tag: [array.dtype.str, list(array.shape), *_stored(array.tobytes(), numbers)]}
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype), list(value.shape), *_stored(flat, numbers)]}
    if kind in (datetime.datetime, datetime.date, datetime.time):
        return {kind.__name__: value.isoformat()}
    if kind is decimal.Decimal:
        return {"decimal": str(value)}
    names = _field_names(kind)
    if names is not None and _loaded_class(kind.__module__, kind.__qualname__) is kind:
        fields = [_encoded(getattr(value, name), numbers) for name in names]
        return {"object": [kind.__module__, kind.__qualname__, fields]}
    raise DataError(
        f"a prepared sample contains a {kind.__module__}.{kind.__qualname__}, which the tokenized cache cannot store; "
        "let prepare_sample return plain values, arrays, tensors and dataclasses of modules, or set "
        "megatron_wrap.data.cache_dir to null"
    )


def _encoded_list(values: list[Any], numbers: bytearray) -> Any:
    kinds = set(map(type, values))
    if len(values) >= _MANY and kinds in ({int}, {float}):
        code = "i8" if kinds == {int} else "f8"
        try:
            return {code: _stored(np.array(values, dtype=f"<{code}").tobytes(), numbers)}
        except OverflowError:
            return values
    return [_encoded(item, numbers) for item in values]


def _stored(content: bytes, numbers: bytearray) -> list[int]:
    begin = len(numbers)
    numbers += content
    return [begin, len(numbers)]


def _decoded(value: Any, numbers: memoryview) -> Any:
    if isinstance(value, list):
        return [_decoded(item, numbers) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return _DECODERS[tag](content, numbers)


def _array(content: Any, numbers: memoryview) -> np.ndarray:
    name, shape, begin, end = content
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise ValueError(f"dtype {name}")
    return np.frombuffer(numbers[begin:end], dtype=dtype).reshape(shape).copy()


def _tensor(content: Any, numbers: memoryview) -> torch.Tensor:
    name, shape, begin, end = content
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name}")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers[begin:end]), dtype=dtype).reshape(shape)


def _object(content: Any, numbers: memoryview) -> Any:
    """An instance of a dataclass or named tuple of a module that is loaded, without a call of its methods."""
    module, name, fields = content
    kind = _loaded_class(module, name)
    names = None if kind is None else _field_names(kind)
    if kind is None or names is None or len(names) != len(fields):
        raise ValueError(f"{module}.{name} is not the class that was stored")
    values = [_decoded(item, numbers) for item in fields]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    created = object.__new__(kind)
    for field, item in zip(names, values, strict=True):
        object.__setattr__(created, field, item)  # also of a frozen class, and past one that defines it
    return created


def _field_names(kind: Any) -> list[str] | None:
    """Names of the fields of a dataclass or named tuple; None for another class."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _loaded_class(module: str, name: str) -> Any:
    value = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return value if isinstance(value, type) else None


_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_DECODERS: dict[str, Callable[[Any, memoryview], Any]] = {
    "tuple": lambda content, numbers: tuple(_decoded(item, numbers) for item in content),
    "set": lambda content, numbers: {_decoded(item, numbers) for item in content},
    "frozenset": lambda content, numbers: frozenset(_decoded(item, numbers) for item in content),
    "dict": lambda content, numbers: {_decoded(key, numbers): _decoded(item, numbers) for key, item in content},
    "bytes": lambda content, numbers: bytes(numbers[content[0] : content[1]]),
    "bytearray": lambda content, numbers: bytearray(numbers[content[0] : content[1]]),
    "i8": lambda content, numbers: np.frombuffer(numbers[content[0] : content[1]], "<i8").tolist(),
    "f8": lambda content, numbers: np.frombuffer(numbers[content[0] : content[1]], "<f8").tolist(),
    "array": _array,
    "scalar": lambda content, numbers: _array(content, numbers)[()],
    "tensor": _tensor,
    "datetime": lambda content, _: datetime.datetime.fromisoformat(content),
    "date": lambda content, _: datetime.date.fromisoformat(content),
    "time": lambda content, _: datetime.time.fromisoformat(content),
    "decimal": lambda content, _: decimal.Decimal(content),
    "object": _object,
}
