"""Reads samples by position, prepares them for a flow, and reports rows that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_wrap.data.order.stream import SampleStream
from megatron_wrap.data.sources.rows import BadSample, converted
from megatron_wrap.errors import DataError


@dataclass(frozen=True)
class Preparation:
    """The part of a flow that handles one sample, before it is collated with others."""

    prepare: Callable[[Any], Any]
    """Function that encodes a sample; DataError if it cannot be used."""
    lengths: Callable[[Any], Sequence[int]]
    """Function that returns the tokens of each sequence of a prepared sample."""


class PreparedSamples(Protocol):
    """Samples that were prepared before, see `token_cache`."""

    def get(self, position: int) -> Any:
        """The prepared sample at `position`; None if there is none."""

    def lengths(self, position: int) -> Sequence[int] | None:
        """Tokens of each sequence of the prepared sample at `position`; None if there is none."""


class SampleReader:
    """The samples of a stream, each read and prepared once while it is kept.

    Args:
        stream: the order.
        preparation: of the run's flow.
        skip_bad: `problem` reports rows that cannot be used; False: they raise when they are read.
        needs_lengths: rows are checked as soon as they are planned, because their lengths decide the batch.
        max_lengths: name of a source -> most tokens of its samples; longer ones are left out.
        check_lengths: raises a DataError for the lengths of a sample that cannot be used; None: all can.
        cached: samples prepared before; None: there are none.
    """

    def __init__(
        self,
        stream: SampleStream,
        preparation: Preparation,
        skip_bad: bool = False,
        needs_lengths: bool = False,
        max_lengths: Mapping[str, int] | None = None,
        check_lengths: Callable[[Sequence[int]], object] | None = None,
        cached: PreparedSamples | None = None,
    ) -> None:
        self._stream, self._preparation, self._cached = stream, preparation, cached
        self._skip_bad, self._check_lengths = skip_bad, check_lengths
        self._max_lengths = max_lengths or {}
        self.checks_rows = skip_bad or needs_lengths or bool(max_lengths)
        """Whether each row is prepared before its batch is known."""
        self._samples: dict[int, Any] = {}
        self._where: dict[int, str] = {}
        self._prepared: dict[int, Any] = {}
        self._lengths: dict[int, tuple[int, ...]] = {}

    @property
    def samples_per_epoch(self) -> int | None:
        """See `SampleStream`."""
        return self._stream.samples_per_epoch

    def sample(self, position: int) -> Any:
        """The sample as read. DataError with file and row."""
        if position not in self._samples:
            self._samples[position] = self._stream.read(position)
            self._where[position] = self._stream.where(position)  # now: a streaming source cannot go back cheaply
        return self._samples[position]

    def where(self, position: int) -> str:
        """`FILE:ROW` of a sample that is kept."""
        self.sample(position)
        return self._where[position]

    def prepared(self, position: int) -> Any:
        """The prepared sample. DataError with file and row."""
        if position not in self._prepared:
            cached = None if self._cached is None else self._cached.get(position)
            self._prepared[position] = self._prepare(position) if cached is None else cached
        return self._prepared[position]

    def lengths(self, position: int) -> tuple[int, ...]:
        """Tokens of each sequence of the sample."""
        if position not in self._lengths:
            lengths = self._cached_lengths(position)
            self._lengths[position] = tuple(lengths or self._preparation.lengths(self.prepared(position)))
        return self._lengths[position]

    def problem(self, position: int) -> str | None:
        """The reason why the row is left out, beginning with file and row; None if it can be used.

        Raises:
            DataError: it cannot be used, and bad rows are not left out.
        """
        try:
            self._check(position)
            text = self._too_long(position)
        except DataError as error:
            if not self._skip_bad or not isinstance(error, BadSample):
                raise
            text = str(error)
        if text is not None:
            self.forget([position])
        return text

    def forget(self, positions: Sequence[int]) -> None:
        """Release these samples."""
        for kept in (self._samples, self._where, self._prepared, self._lengths):
            for position in positions:
                kept.pop(position, None)

    def _check(self, position: int) -> None:
        if self._cached_lengths(position) is None:
            self.prepared(position)
        if self._check_lengths is not None:
            converted(self._check_lengths, self.lengths(position), lambda: self._stream.where(position))

    def _too_long(self, position: int) -> str | None:
        if not self._max_lengths:
            return None
        sample = self.sample(position)
        limit = self._max_lengths.get(sample.get("source", "")) if isinstance(sample, Mapping) else None
        tokens = 0 if limit is None else sum(self.lengths(position))
        if limit is None or tokens <= limit:
            return None
        return f"{self._stream.where(position)}: {tokens} tokens are more than max_length {limit} of the source"

    def _prepare(self, position: int) -> Any:
        return converted(self._preparation.prepare, self.sample(position), lambda: self._stream.where(position))

    def _cached_lengths(self, position: int) -> Sequence[int] | None:
        return None if self._cached is None else self._cached.lengths(position)
