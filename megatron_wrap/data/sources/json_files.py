"""JSON files that are not plain JSON lines: compressed ones, and one array of objects."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megatron_wrap.data.sources.json_lines import MAX_LINE_BYTES, JsonLines, open_stored, parse_line, too_long
from megatron_wrap.data.sources.rows import BadSample, ListedRows, Rows, RowStream, StreamOfRows
from megatron_wrap.errors import DataError
from megatron_wrap.utils.atomic_write import atomic_file
from megatron_wrap.utils.file_lock import locked

_COMPRESSED = (".gz", ".zst")
_BLOCK_BYTES = 1 << 20
_BUFFER = 1 << 18
"""Bytes that are read at once: with Python's 8 KiB, reading lines takes five times as long."""
_DAMAGE = (OSError, EOFError, zlib.error)
_FREE_EXPANSION = 1 << 28
_MAX_EXPANSION = 200
"""Largest ratio of decompressed to stored bytes, of a file of more than _FREE_EXPANSION decompressed bytes; text
reaches 3 to 20."""


def open_json(path: str) -> Rows:
    """Random access to a file of JSON lines or one JSON array, plain, gzip (.gz) or zstd (.zst).

    A compressed file is decompressed once into the cache folder of `datasets` (HF_DATASETS_CACHE).

    Raises:
        DataError: the file is missing, empty, truncated or malformed.
    """
    if is_array(path):
        return ListedRows(_read_array(path), path)
    return JsonLines(_decompressed(path), shown=path) if path.endswith(_COMPRESSED) else JsonLines(path)


def stream_json(path: str) -> RowStream:
    """The rows of a file of such a format in order, without an index or a decompressed copy."""
    if is_array(path):
        return StreamOfRows(ListedRows(_read_array(path), path))
    return LineStream(path)


class LineStream:
    """The objects of a file of JSON lines in order; empty lines are skipped. See `RowStream`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.length: int | None = None

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        """See `RowStream`; lines before `index` are read and not parsed."""
        rows = 0
        with open_bytes(self._path)[0] as file:
            for number, line in numbered_lines(self._path, file, MAX_LINE_BYTES):
                if line.isspace():
                    continue
                if rows >= index:
                    where = f"{self._path}:{number}"
                    yield where, _parsed(line, where, first=number == 1)
                rows += 1
        self.length = rows


def _parsed(line: bytes, where: str, first: bool) -> dict[str, Any] | BadSample:
    if len(line) > MAX_LINE_BYTES:
        return BadSample(too_long(where, len(line), MAX_LINE_BYTES))
    try:
        return parse_line(line.rstrip(), first)
    except DataError as error:
        return BadSample(f"{where}: {error}")


def numbered_lines(path: str, file: IO[bytes], limit: int) -> Iterator[tuple[int, bytes]]:
    """Number from 1 and bytes of each line; only the first limit + 1 bytes of a longer one.

    Args:
        path: for messages.
        file: of `open_bytes`.
        limit: largest number of bytes of a line that are read.

    Raises:
        DataError: the file is truncated or damaged.
    """
    number, inside = 0, False
    while True:
        try:
            line = file.readline(limit + 1)
        except _DAMAGE as error:
            raise _damaged(path, error, f" after line {number}") from error
        if not line:
            return
        if not inside:
            number += 1
            yield number, line
        inside = not line.endswith(b"\n")


def open_bytes(path: str) -> tuple[IO[bytes], IO[bytes]]:
    """The decompressed bytes of a file that may be gzip (.gz) or zstd (.zst), and the stored file, whose `tell` is the
    progress.

    Raises:
        DataError: it is missing, a folder or unreadable.
    """
    stored = open_stored(path, _BUFFER)
    if path.endswith(".gz"):
        opened: Any = gzip.GzipFile(fileobj=stored, mode="rb")
    elif path.endswith(".zst"):
        import pyarrow

        # an input stream of pyarrow reads a concatenation of frames, as `zstd` and `pzstd` write them
        opened = pyarrow.input_stream(stored, compression="zstd")
    else:
        return stored, stored
    limit = max(_FREE_EXPANSION, _MAX_EXPANSION * os.fstat(stored.fileno()).st_size)
    return io.BufferedReader(_Decompressed(opened, limit, path), _BLOCK_BYTES), stored


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a file; DataError after `limit` of them."""

    def __init__(self, opened: Any, limit: int, path: str) -> None:
        self._opened, self._left, self._path = opened, limit, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._opened.readinto(buffer))
        self._left -= count
        if self._left < 0:
            raise DataError(
                f"{self._path}: its content is more than {_MAX_EXPANSION} times as large as the file, so it most "
                "likely does not end; decompress it to a file if that is intended"
            )
        return count

    def close(self) -> None:
        self._opened.close()
        super().close()


def _damaged(path: str, error: Exception, where: str = "") -> DataError:
    kind = "gzip" if path.endswith(".gz") else "zstd" if path.endswith(".zst") else "data"
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"{path}: truncated or damaged {kind} file{where} ({reason}); write or download it again")


def is_array(path: str) -> bool:
    """Whether a .json file has `[` as its first character, which only one array of objects can begin with."""
    if not path.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
        return False
    with open_bytes(path)[0] as file:
        return _read(file, 4096, path).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _read_array(path: str) -> list[Any]:
    with open_bytes(path)[0] as file:
        content = _read(file, -1, path)
    try:
        rows: list[Any] = json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or deep nesting
        raise DataError(f"{path}: not JSON ({error}); write an array of objects, or one object per line") from error
    return rows


def _read(file: IO[bytes], size: int, path: str) -> bytes:
    try:
        return file.read(size)
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def _decompressed(path: str) -> Path:
    """The decompressed copy of a file, in a folder named after its path, size and time of change."""
    import datasets

    open_stored(path).close()  # DataError if it cannot be read
    source = os.path.abspath(os.path.expanduser(path))
    state = os.stat(source)
    name = hashlib.sha256(f"{source}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:32]
    copy = Path(datasets.config.HF_DATASETS_CACHE) / "megatron_wrap" / f"{name}.jsonl"
    copy.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{copy}.lock"), "decompresses a file"):
        if not copy.is_file():
            with open_bytes(path)[0] as file, atomic_file(copy) as target:
                while block := _read(file, _BLOCK_BYTES, path):
                    target.write(block)
    return copy
