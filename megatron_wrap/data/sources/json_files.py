"""JSON files: lines of objects with random access by byte offsets, compressed ones, and one array of objects."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import weakref
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_wrap.data.sources.rows import BadSample, ListedRows, Rows, RowStream, StreamOfRows, converted
from megatron_wrap.errors import DataError, special_file
from megatron_wrap.nearest_names import missing_path_hint
from megatron_wrap.utils.atomic_write import atomic_file
from megatron_wrap.utils.file_lock import locked

MAX_LINE_BYTES = 1 << 25
"""Largest size of a line in bytes. Longer lines are refused: the file most likely lacks its line feeds, or is one JSON
array."""
_BLOCK_BYTES = 1 << 20


class JsonLines(Sequence[dict[str, Any]]):
    """The JSON objects of a file with one object per line, UTF-8; empty lines are skipped.

    Memory: 8 bytes per line. The first `len` or `[i]` scans the file for the offsets. Reads use `os.pread`, so threads
    and forked workers can share an object; a pickled copy reopens the file. The file must not change while in use.

    Args:
        path: the file; error messages contain the path as it was passed.
        shown: path for error messages, if the file is a decompressed copy.

    Raises:
        DataError: the file is missing (the message suggests the closest name in its folder), a folder, or unreadable.
            A malformed line raises `BadSample` when it is read.
    """

    def __init__(self, path: str | Path, shown: str | None = None) -> None:
        self.path = str(path) if shown is None else shown
        self._offsets: array[int] | None = None
        self._counted = (0, 0)  # a byte offset, and the newlines before it: the last answer of `where`
        self._absolute_path = os.path.abspath(os.path.expanduser(path))  # independent of a later chdir
        self._file = open_raw(path)
        weakref.finalize(self, self._file.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonLines, (self._absolute_path, self.path)

    def where(self, index: int) -> str:
        """`FILE:LINE` of sample `index` for error messages; line numbers start at 1 and include empty lines."""
        start = self._index()[range(len(self))[index]]
        counted, newlines = self._counted if self._counted[0] <= start else (0, 0)
        for begin in range(counted, start, _BLOCK_BYTES):
            newlines += os.pread(self._file.fileno(), min(_BLOCK_BYTES, start - begin), begin).count(b"\n")
        self._counted = (start, newlines)
        return f"{self.path}:{newlines + 1}"

    def __len__(self) -> int:
        return len(self._index()) - 1

    def __getitem__(self, index: Any) -> Any:
        """Sample `index` (negative: from the end); BadSample if the line is malformed."""
        position = range(len(self))[index]
        offsets = self._index()
        start = offsets[position]
        length = offsets[position + 1] - start
        if length > MAX_LINE_BYTES:
            raise BadSample(too_long(self.where(position), length, MAX_LINE_BYTES))
        # Read up to the next sample, and strip empty lines between the two.
        line = os.pread(self._file.fileno(), length, start).rstrip()
        return converted(functools.partial(parse_line, first=start == 0), line, lambda: self.where(position))

    def _index(self) -> array[int]:
        """Offsets of the non-empty lines; the last entry is the end of the last sample."""
        if self._offsets is not None:
            return self._offsets
        offsets, position = array("q"), 0
        with open(self._absolute_path, "rb", _BLOCK_BYTES) as file:
            inside = False  # of a line longer than what is read at once
            for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                if not inside and not line.isspace():
                    offsets.append(position)
                position += len(line)
                inside = not line.endswith(b"\n")
        offsets.append(position)
        self._offsets = offsets
        return offsets


def open_raw(path: str | Path, buffering: int = 0) -> IO[bytes]:
    """Open a data file as it is stored; `~` is the home folder.

    Raises:
        DataError: it is missing, a folder, a pipe or device, or unreadable.
    """
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        raise DataError(f"{path}: is a folder; give a data file")
    if reason := special_file(expanded):
        raise DataError(reason)
    try:
        return open(expanded, "rb", buffering)
    except FileNotFoundError:
        raise DataError(f"{path}: no such data file{missing_path_hint(str(path))}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_line(line: bytes, first: bool) -> dict[str, Any]:
    """The JSON object of one line.

    Args:
        first: the line begins its file; a byte order mark, which JSON does not allow, is then skipped.

    Raises:
        DataError: it is not UTF-8, not JSON or no object; without file and line.
    """
    try:
        sample = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} (column {error.colno}); every line must be one JSON object") from error
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from error
    except RecursionError as error:
        raise DataError("not JSON: nested too deeply; every line must be one JSON object") from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"not JSON: {error}; every line must be one JSON object") from error
    if not isinstance(sample, dict):
        raise DataError(f'must be a JSON object like {{"messages": []}}, not a {type(sample).__name__}')
    return sample


def too_long(where: str, length: int, limit: int) -> str:
    """The message about a line of `length` bytes, not all of which may have been read."""
    return (
        f"{where}: a line of {length:,} bytes or more, and a sample may have {limit:,}; write one JSON object per "
        "line, or divide it"
    )


_COMPRESSED = (".gz", ".zst")
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
    raw_file = open_raw(path, _BUFFER)
    if path.endswith(".gz"):
        opened: Any = gzip.GzipFile(fileobj=raw_file, mode="rb")
    elif path.endswith(".zst"):
        import pyarrow

        # an input stream of pyarrow reads a concatenation of frames, as `zstd` and `pzstd` write them
        opened = pyarrow.input_stream(raw_file, compression="zstd")
    else:
        return raw_file, raw_file
    limit = max(_FREE_EXPANSION, _MAX_EXPANSION * os.fstat(raw_file.fileno()).st_size)
    return io.BufferedReader(_Decompressed(opened, limit, path), _BLOCK_BYTES), raw_file


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

    open_raw(path).close()  # DataError if it cannot be read
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
