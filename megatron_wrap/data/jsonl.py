"""Random access to JSON-lines files: byte offsets in memory, lines parsed on access."""

import copy
import json
import os
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from megatron_wrap.config.paths import missing_path_hint
from megatron_wrap.errors import DataError


class JsonLines(Sequence[dict[str, Any]]):
    """The JSON objects of a file with one object per line, UTF-8; empty lines are skipped.

    Memory: 8 bytes per line. The first `len` or `[i]` scans the file for the offsets. Reads use `os.pread`, so threads
    and forked workers can share an object; a pickled copy reopens the file. The file must not change while in use.

    Args:
        path: the file; error messages contain the path as given.

    Raises:
        DataError: the file is missing (the message suggests the closest name in its folder), a folder, or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._absolute_path = os.path.abspath(Path(self.path).expanduser())  # independent of a later chdir
        self._offsets: array[int] | None = None
        self._descriptor = self._open()

    def check(self) -> int:
        """Parse every line and return the number of samples.

        Raises:
            DataError: a malformed line (the message has file and line number), or a file without samples.
        """
        for _ in self:
            pass
        if len(self) == 0:
            size = os.fstat(self._descriptor).st_size
            raise DataError(f"{self.path}: no samples in {size} bytes; write one JSON object per line")
        return len(self)

    def head(self, count: int) -> list[dict[str, Any]]:
        """The first `count` samples (or all, if fewer) without a scan of the whole file."""
        part = copy.copy(self)  # reopens the file
        part._offsets = self._index_of(count)
        return list(part)

    def where(self, index: int) -> str:
        """`FILE:LINE` of sample `index` for error messages; line numbers start at 1 and include empty lines."""
        start = self._index()[self._position(index)]
        block_bytes = 1 << 20
        newlines = 0
        for begin in range(0, start, block_bytes):
            newlines += os.pread(self._descriptor, min(block_bytes, start - begin), begin).count(b"\n")
        return f"{self.path}:{newlines + 1}"

    def __len__(self) -> int:
        return len(self._index()) - 1

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Sample `index` (negative: from the end), or a list of samples; DataError if a line is malformed."""
        if isinstance(index, slice):
            return [self._parse(position) for position in range(*index.indices(len(self)))]
        return self._parse(self._position(index))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._parse(position) for position in range(len(self)))

    def __repr__(self) -> str:
        return f"JsonLines({self.path!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_descriptor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._descriptor = self._open()

    def _open(self) -> int:
        if os.path.isdir(self._absolute_path):
            raise DataError(f"{self.path}: is a folder; give a JSON-lines file")
        try:
            descriptor = os.open(self._absolute_path, os.O_RDONLY)
        except FileNotFoundError:
            raise DataError(f"{self.path}: no such data file{missing_path_hint(self.path)}") from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _index(self) -> "array[int]":
        """Offsets of the non-empty lines; the last entry is the end of the last sample."""
        if self._offsets is None:
            self._offsets = self._index_of(None)
        return self._offsets

    def _index_of(self, count: int | None) -> "array[int]":
        """`_index` of the first `count` samples; None: of all."""
        offsets, position = array("q"), 0
        with open(self._absolute_path, "rb") as file:
            for line in file:
                if len(offsets) == count:
                    break
                if not line.isspace():
                    offsets.append(position)
                position += len(line)
        offsets.append(position)
        return offsets

    def _position(self, index: int) -> int:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"{self.path}: sample {index} of {length}")
        return index % length

    def _parse(self, position: int) -> dict[str, Any]:
        offsets = self._index()
        start = offsets[position]
        # Read up to the next sample, and strip empty lines between the two.
        line = os.pread(self._descriptor, offsets[position + 1] - start, start).rstrip()
        try:
            # Windows editors may start a file with a byte order mark, which JSON does not allow.
            sample = json.loads(line.decode("utf-8-sig" if start == 0 else "utf-8"))
        except json.JSONDecodeError as error:
            where = f"{self.where(position)}: not JSON: {error.msg} (column {error.colno})"
            raise DataError(f"{where}; every line must be one JSON object") from error
        except UnicodeDecodeError as error:
            where = f"{self.where(position)}: not UTF-8 (byte {error.start + 1} of the line)"
            raise DataError(f"{where}; save the file as UTF-8") from error
        if not isinstance(sample, dict):
            raise DataError(
                f'{self.where(position)}: must be a JSON object like {{"messages": []}}, not a {type(sample).__name__}'
            )
        return sample
