"""What a reader of samples offers, and the error of a row that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Rows that can only be read in order."""

    def start_at(self, index: int) -> Iterator[Any]:
        """The rows from `index` to the end of the source; in place of a row that cannot be used its BadSample. Empty
        if the source ends before.

        Raises:
            DataError: the source cannot be read any further.
        """

    def where(self, index: int) -> str:
        """`FILE:ROW` of row `index`, for messages."""
