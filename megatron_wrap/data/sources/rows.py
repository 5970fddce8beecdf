"""The interface of readers, their combinations, and the error of a row that cannot be used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

from megatron_wrap.errors import DataError

Sample = dict[str, Any]


class BadSample(DataError):
    """One row cannot be used; the others can. `on_bad_sample: skip` leaves such a row out, any other DataError ends the
    run. The message begins with `FILE:ROW`; rows count from 1, in JSON lines files they are lines."""


def converted(convert: Callable[[Any], Any], row: Any, where: Callable[[], str]) -> Any:
    """`convert(row)`.

    Args:
        where: returns the row as `FILE:ROW`.

    Raises:
        BadSample: the row is one, or `convert` raised a DataError; the message begins with the row.
    """
    if isinstance(row, BadSample):
        raise row
    try:
        return convert(row)
    except BadSample:
        raise
    except DataError as error:
        raise BadSample(f"{where()}: {error}") from error


class Rows(Protocol):
    """Random access to the rows of a source, by index from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:
        """Row `index` from 0; BadSample if it is malformed."""

    def where(self, index: int) -> str:
        """`FILE:ROW` of row `index`, for messages."""


class RowStream(Protocol):
    """Rows that are read in order. Each `start_at` opens the file again."""

    @property
    def length(self) -> int | None:
        """Number of rows; None: not known before an iterator reaches the end."""

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        """Pairs of `FILE:ROW` and row (a malformed row as its BadSample), from row `index` to the end.

        Raises:
            DataError: the source cannot be read any further.
        """


class JoinedRows:
    """Several readers, concatenated."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(len(part) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        part, row = self._locate(index)
        return part[row]

    def where(self, index: int) -> str:
        """See `Rows`."""
        part, row = self._locate(index)
        return part.where(row)

    def _locate(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


class ChosenRows:
    """The rows of a reader with the given indices; messages contain their row numbers in the whole reader."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._rows[self._indices[index]]

    def where(self, index: int) -> str:
        """See `Rows`."""
        return self._rows.where(self._indices[index])


class ListedRows:
    """A sequence in memory; `where` is `NAME:ROW`."""

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        self._rows, self._name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]

    def where(self, index: int) -> str:
        """See `Rows`; the sequence's own `where`, if it has one."""
        where = getattr(self._rows, "where", None)
        return str(where(index)) if callable(where) else f"{self._name}:{index + 1}"


class StreamOfRows:
    """Random access read as a stream."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.length: int | None = len(rows)

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        """See `RowStream`."""
        for number in range(index, len(self._rows)):
            try:
                row = self._rows[number]
            except BadSample as error:
                row = error
            yield self._rows.where(number), row


class JoinedStreams:
    """Several streams, concatenated."""

    def __init__(self, parts: Sequence[RowStream]) -> None:
        self._parts = list(parts)

    @property
    def length(self) -> int | None:
        """See `RowStream`."""
        lengths = [part.length for part in self._parts]
        return None if None in lengths else sum(length or 0 for length in lengths)

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        """See `RowStream`."""
        for part in self._parts:
            if part.length is None or part.length > index:
                yield from part.start_at(index)
            assert part.length is not None, "a stream has a length after its end"
            index = max(0, index - part.length)
