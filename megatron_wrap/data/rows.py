"""What a reader of samples offers, and the error of a row that cannot be used."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

from megatron_wrap.errors import DataError

Sample = dict[str, Any]


class BadSample(DataError):
    """One row cannot be used; the others can. `on_bad_sample: skip` leaves such a row out, any other DataError ends the
    run. The message begins with `FILE:ROW`; rows count from 1, in JSON lines files they are lines."""


class Rows(Protocol):
    """Random access to the rows of a source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:
        """Row `index` from 0; BadSample if it is malformed."""

    def where(self, index: int) -> str:
        """`FILE:ROW` of row `index`, for messages."""


class RowStream(Protocol):
    """Rows that are read in order. A file is opened anew by each `start_at`."""

    @property
    def length(self) -> int | None:
        """Number of rows; None: not known before an iterator has come to its end."""

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        """`FILE:ROW` and row, from row `index` to the end; in place of a malformed row its BadSample. Nothing if there
        are not more than `index` rows.

        Raises:
            DataError: the source cannot be read any further.
        """


class JoinedRows:
    """Several readers, one behind the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(len(part) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        part, place = self._place(index)
        return part[place]

    def where(self, index: int) -> str:
        """See `Rows`."""
        part, place = self._place(index)
        return part.where(place)

    def _place(self, index: int) -> tuple[Rows, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


class PartOfRows:
    """Rows `begin` to `end` (exclusive) of a reader; messages have the places in the whole."""

    def __init__(self, rows: Rows, begin: int, end: int) -> None:
        self._rows = rows
        self._begin, self._end = min(begin, len(rows)), min(end, len(rows))

    def __len__(self) -> int:
        return max(0, self._end - self._begin)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._rows[self._begin + index]

    def where(self, index: int) -> str:
        """See `Rows`."""
        return self._rows.where(self._begin + index)


class ChosenRows:
    """The rows of a reader at the given places."""

    def __init__(self, rows: Rows, places: Sequence[int]) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        return self._rows[self._places[index]]

    def where(self, index: int) -> str:
        """See `Rows`."""
        return self._rows.where(self._places[index])


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
        own = getattr(self._rows, "where", None)
        return str(own(index)) if callable(own) else f"{self._name}:{index + 1}"


class StreamOfRows:
    """Random access as a stream."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.length: int | None = len(rows)

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        """See `RowStream`."""
        for place in range(index, len(self._rows)):
            row: Any
            try:
                row = self._rows[place]
            except BadSample as error:
                row = error
            yield self._rows.where(place), row


class JoinedStreams:
    """Several streams, one behind the other."""

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
            assert part.length is not None, "a stream that has come to its end has a length"
            index = max(0, index - part.length)
