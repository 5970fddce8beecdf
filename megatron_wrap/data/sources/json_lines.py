"""Random access to JSON-lines files: byte offsets in memory, lines parsed on access."""

import functools
import json
import os
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from megatron_wrap.data.sources.rows import BadSample, converted
from megatron_wrap.errors import DataError, missing_path_hint, special_file

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
        self._file = open_stored(path)
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

    def _index(self) -> "array[int]":
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


def open_stored(path: str | Path, buffering: int = 0) -> IO[bytes]:
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
