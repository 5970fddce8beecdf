"""Reads documents from JSON lines, tables, text and source code, in order, in batches for other processes to parse."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron_wrap.data.sources import json_files, tables
from megatron_wrap.data.sources.json_files import parse_line, too_long
from megatron_wrap.data.sources.rows import BadSample
from megatron_wrap.errors import DataError
from megatron_wrap.nearest_names import did_you_mean, missing_path_hint

Texts = list[str]
"""The sequences of a document: one, or the sentences of a row whose value is a list."""
Unit = Literal["file", "paragraph", "line"]
_BATCH_BYTES, _BATCH_ROWS = 1 << 19, 512
_MAX_DOCUMENT_BYTES = 1 << 28
_TABLES = (".parquet",)
_JSON = (".jsonl", ".json", ".ndjson")
_COMPRESSED = (".gz", ".zst")


class Position(NamedTuple):
    """The point at which reading continues."""

    file: int = 0
    """Index of the input file, from 0."""
    row: int = 0
    """Index of the row, line or paragraph in the file."""


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of one file, not parsed yet.

    Attributes:
        path: the file; "" for a batch of whole files.
        numbers: number of each row from 1, for messages.
        rows: lines of JSON (bytes), rows of a table (mappings or BadSample), lines or paragraphs (bytes), or paths.
        end: position after this batch, at which the next one begins.
        done_bytes: stored bytes of all input files up to `end`.
    """

    kind: Literal["json", "table", "text", "files"]
    path: str
    numbers: Sequence[int]
    rows: Sequence[Any]
    end: Position
    done_bytes: int


class InputFiles:
    """The files that a command names, in the order of the names; those of a folder or pattern sorted by path.

    Args:
        inputs: files, patterns such as `part-*.jsonl`, and folders, which are searched at every depth.
        keys: columns to read from tables.
        suffixes: endings of the names to take from folders and patterns; empty: JSON lines and tables if a folder has
            any, else all its files. Hidden files and folders are left out.
        unit: the unit of a document in files that are neither JSON nor tables.

    Raises:
        DataError: an input is missing, contains no such file, or has no keys where several are given.
    """

    def __init__(self, inputs: Sequence[str], keys: Sequence[str], suffixes: Sequence[str] = (), unit: Unit = "file"):
        self._keys, self._unit = list(keys), unit
        self.paths = [path for name in inputs for path in _files(name, tuple(suffixes))]
        self.sizes = [os.path.getsize(path) for path in self.paths]
        self.total_bytes = sum(self.sizes)
        other = next((path for path in self.paths if not _plain(path).endswith(_JSON + _TABLES)), None)
        if len(self._keys) > 1 and other is not None:
            raise DataError(
                f"{other}: has no keys, and --json-keys names {', '.join(self._keys)}; give text and source code in a "
                "command of their own, without --json-keys"
            )

    def read(self, start: Position = Position()) -> Iterator[Batch]:  # noqa: B008 - immutable
        """The batches from a position on.

        Raises:
            DataError: a file cannot be read any further.
        """
        number, row = start
        done = sum(self.sizes[:number])
        while number < len(self.paths):
            path = self.paths[number]
            if not self._is_whole(path):
                yield from self._read_rows(number, row, done)
                done, number, row = done + self.sizes[number], number + 1, 0
                continue
            files = [number]
            size = self.sizes[number]
            while len(files) < _BATCH_ROWS and size < _BATCH_BYTES and files[-1] + 1 < len(self.paths):
                following = files[-1] + 1
                if not self._is_whole(self.paths[following]):
                    break
                files.append(following)
                size += self.sizes[following]
            done += size
            number = files[-1] + 1
            yield Batch("files", "", [1] * len(files), [self.paths[index] for index in files], Position(number), done)

    def _is_whole(self, path: str) -> bool:
        return self._unit == "file" and not _plain(path).endswith(_JSON + _TABLES)

    def _read_rows(self, number: int, first: int, done: int) -> Iterator[Batch]:
        """The rows of a file from `first` on; `done` bytes of the files before it were read."""
        path = self.paths[number]
        if path.endswith(_TABLES) or json_files.is_array(path):
            stream = tables.stream_parquet(path, self._keys) if path.endswith(_TABLES) else json_files.stream_json(path)
            rows = ((count, count, row) for count, (_, row) in enumerate(stream.start_at(first), first + 1))

            def done_at(count: int) -> int:
                return int(min(1.0, count / stream.length) * self.sizes[number]) if stream.length else 0

            yield from self._batches("table", number, done, rows, done_at)
            return
        kind: Literal["json", "text"] = "json" if _plain(path).endswith(_JSON) else "text"
        file, raw_file = json_files.open_bytes(path)
        with file:
            lines = json_files.numbered_lines(path, file, _MAX_DOCUMENT_BYTES)
            parts = _paragraphs(lines) if kind == "text" and self._unit == "paragraph" else lines
            numbered = enumerate(parts, 1)
            rows = ((count, at, line) for count, (at, line) in numbered if count > first and not line.isspace())
            yield from self._batches(kind, number, done, rows, lambda _: raw_file.tell())

    def _batches(
        self,
        kind: Literal["json", "table", "text"],
        number: int,
        done: int,
        rows: Iterator[tuple[int, int, Any]],
        done_at: Callable[[int], int],
    ) -> Iterator[Batch]:
        """Batches of rows of a file, each with the rows up to its end, its number in messages, and its content."""
        path, count, size = self.paths[number], 0, 0
        numbers: list[int] = []
        batch: list[Any] = []
        for count, row_number, row in rows:
            numbers.append(row_number)
            batch.append(row)
            if isinstance(row, bytes):
                size += len(row)
            elif isinstance(row, dict):
                size += sum(len(str(row.get(key))) for key in self._keys)
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_ROWS:
                yield Batch(kind, path, numbers, batch, Position(number, count), done + done_at(count))
                numbers, batch, size = [], [], 0
        if batch:
            yield Batch(kind, path, numbers, batch, Position(number, count), done + self.sizes[number])


def texts_of(batch: Batch, keys: Sequence[str]) -> Iterator[tuple[str, list[Texts] | BadSample]]:
    """`FILE:ROW` and, for each key, the texts of the document, or the BadSample of a row that cannot be used.

    Text and source code have one key, whatever its name. A row's value is a text or a list of texts.
    """
    for number, row in zip(batch.numbers, batch.rows, strict=True):
        where = row if batch.kind == "files" else f"{batch.path}:{number}"
        try:
            yield where, _texts(batch.kind, row, keys, where, first=number == 1)
        except BadSample as error:
            yield where, error


def _texts(kind: str, row: Any, keys: Sequence[str], where: str, first: bool) -> list[Texts]:
    if isinstance(row, BadSample):
        raise row
    if isinstance(row, bytes) and len(row) > _MAX_DOCUMENT_BYTES:
        raise BadSample(too_long(where, len(row), _MAX_DOCUMENT_BYTES))
    if kind in ("text", "files"):
        return [[_decoded(_content(row) if kind == "files" else row.rstrip(b"\r\n"), where)]]
    if kind == "json":
        try:
            row = parse_line(row.rstrip(), first)
        except DataError as error:
            raise BadSample(f"{where}: {error}") from error
    if not isinstance(row, dict):
        keys_text = ", ".join(keys)
        raise BadSample(f"{where}: of type {type(row).__name__}; it must be a JSON object with the keys {keys_text}")
    return [_value(row, key, where) for key in keys]


def _value(row: dict[str, Any], key: str, where: str) -> Texts:
    value = row.get(key)
    texts = value if isinstance(value, list) else [value]
    if key not in row:
        hint = did_you_mean(key, row) or f"; it has {', '.join(map(repr, row)) or 'none'}"
        raise BadSample(f"{where}: no key {key!r}{hint}; name the keys with --json-keys")
    if not all(isinstance(text, str) for text in texts):
        wrong = next(text for text in texts if not isinstance(text, str))
        raise BadSample(f"{where}: {key!r} is of type {type(wrong).__name__}; it must be a text, or a list of texts")
    return list(texts)


def _content(path: str) -> bytes:
    file, _ = json_files.open_bytes(path)
    with file:
        content = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(content) > _MAX_DOCUMENT_BYTES:
        raise BadSample(
            f"{path}: a document of more than {_MAX_DOCUMENT_BYTES:,} bytes; divide it with --text-unit paragraph or "
            "line"
        )
    return content


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(f"{where}: not UTF-8 (byte {error.start + 1}); save it as UTF-8") from error


def _paragraphs(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Number of the first line and bytes of each part between empty lines."""
    number, part = 0, bytearray()
    for line_number, line in lines:
        if not line.isspace():
            number = number if part else line_number
            part += line
        elif part:
            yield number, bytes(part)
            part = bytearray()
    if part:
        yield number, bytes(part)


def _files(name: str, suffixes: tuple[str, ...]) -> list[str]:
    expanded = os.path.expanduser(name)
    if os.path.isfile(expanded):
        return [expanded]
    if os.path.isdir(expanded):
        paths = _below(expanded)
        data = [path for path in paths if _plain(path).endswith(_JSON + _TABLES)]
        files = [path for path in paths if path.endswith(suffixes)] if suffixes else data or paths
    elif glob.has_magic(name):
        matches = glob.glob(expanded, recursive=True)
        files = sorted(path for path in matches if os.path.isfile(path) and path.endswith(suffixes or ("",)))
    else:
        raise DataError(f"{name}: no such input{missing_path_hint(name)}")
    if not files:
        condition = f" with the ending {' or '.join(suffixes)}" if suffixes else ""
        raise DataError(f"{name}: contains no file{condition}; give --input other files")
    return files


def _below(folder: str) -> list[str]:
    paths = []
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        paths += [os.path.join(base, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def _plain(path: str) -> str:
    """The name of a file without the ending of its compression."""
    for end in _COMPRESSED:
        path = path.removesuffix(end)
    return path
