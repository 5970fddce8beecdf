"""The one endless order of a run's training samples, a function of the seed and the position alone.

Every rank and worker computes the same order, and a resumed run reads on from the number of samples that it consumed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from megatron_wrap.data.rows import BadSample, Rows, RowStream, Sample
from megatron_wrap.data.samplers import EpochSampler
from megatron_wrap.errors import DataError


class SampleStream(Protocol):
    """An endless sequence of samples.

    Reading positions one after the other takes constant time each; a streaming source reads over what a jump leaves
    out, and begins anew for a jump back. Use one object in each process and thread.
    """

    @property
    def samples_per_epoch(self) -> int | None:
        """Positions of an epoch; None: not known, because a source is streaming."""

    def read(self, position: int) -> Sample:
        """The sample at `position`, from 0 on, over all epochs.

        Raises:
            BadSample: this row cannot be used; the message begins with its file and row. Others can be read.
            DataError: the source cannot be read at all.
        """

    def where(self, position: int) -> str:
        """`FILE:ROW` of the sample at `position`, for messages."""

    def row(self, position: int) -> tuple[int, int] | None:
        """Number of the source and its row, both from 0; None: the source has no random access."""


class ShuffledRows:
    """All rows of one source, epoch after epoch, in the order of `EpochSampler`.

    Args:
        rows: the source.
        seed, shuffle, part: as in `EpochSampler`.
    """

    def __init__(self, rows: Rows, seed: int, shuffle: bool = True, part: int = 0) -> None:
        self._rows = rows
        self._sampler = EpochSampler(len(rows), seed, shuffle, part)

    @property
    def samples_per_epoch(self) -> int:
        """Number of rows."""
        return self._sampler.num_samples

    def read(self, position: int) -> Sample:
        """See `SampleStream`."""
        sample: Sample = self._rows[self._place(position)]
        return sample

    def where(self, position: int) -> str:
        """See `SampleStream`."""
        return self._rows.where(self._place(position))

    def row(self, position: int) -> tuple[int, int]:
        """See `SampleStream`."""
        return 0, self._place(position)

    def _place(self, position: int) -> int:
        return self._sampler.indices(position, 1)[0]


class ShuffledBlocks:
    """All rows of a streaming source, epoch after epoch, shuffled in blocks.

    The k-th block of epoch e has rows [k * block, (k + 1) * block) of the source, permuted by NumPy's PCG64 with seed
    (seed, e, k, part); the last one of an epoch may be smaller. One block is in memory.

    Args:
        rows: the source.
        convert: from a row to a sample; raises DataError without a place.
        seed: at least 0.
        shuffle: False: the order of the source.
        block: rows of a block, at least 1.
        part: number of the source in a mixture from 1 on; 0: no mixture.

    Raises:
        DataError: a negative seed.
    """

    def __init__(
        self,
        rows: RowStream,
        convert: Callable[[Any], Sample],
        seed: int,
        shuffle: bool = True,
        block: int = 1000,
        part: int = 0,
    ) -> None:
        if seed < 0:
            raise DataError(f"the data seed is {seed}; it must be 0 or more")
        self._rows, self._convert = rows, convert
        self._seed, self._shuffle, self._block_size, self._part = seed, shuffle, block, part
        self._length: int | None = None
        self._block: tuple[tuple[int, int], list[tuple[str, Any]]] | None = None
        self._iterator: Iterator[tuple[str, Any]] = iter(())
        self._next = -1  # the row that the iterator yields next; -1: none
        self._process = os.getpid()

    @property
    def samples_per_epoch(self) -> None:
        """Not known before the end was read."""
        return None

    def read(self, position: int) -> Sample:
        """See `SampleStream`."""
        where, row = self._at(position)
        if isinstance(row, BadSample):
            raise row
        try:
            return self._convert(row)
        except DataError as error:
            raise BadSample(f"{where}: {error}") from error

    def where(self, position: int) -> str:
        """See `SampleStream`."""
        return self._at(position)[0]

    def row(self, position: int) -> None:
        """See `SampleStream`."""
        return None

    def _at(self, position: int) -> tuple[str, Any]:
        if position < 0:
            raise DataError(f"cannot read position {position}; it must be 0 or more")
        for _ in range(2):  # the first attempt may find the end of the source
            epoch, offset = divmod(position, self._length) if self._length else (0, position)
            block = self._load(epoch, offset // self._block_size)
            if offset % self._block_size < len(block) and (self._length is None or offset < self._length):
                return block[offset % self._block_size]
        raise AssertionError("a source of known length has every row of an epoch")

    def _load(self, epoch: int, number: int) -> list[tuple[str, Any]]:
        """The rows of a block in their permuted order; empty behind the end of the source, which is then known."""
        if self._block is not None and self._block[0] == (epoch, number):
            return self._block[1]
        first = number * self._block_size
        # a forked process shares the position in an open file with its parent
        if self._next != first or self._process != os.getpid():
            self._iterator, self._process = self._rows.start_at(first), os.getpid()
        self._next = -1  # for the case that the iterator raises
        rows = list(islice(self._iterator, self._block_size))
        if len(rows) < self._block_size:
            self._length = first + len(rows) if rows else self._rows.length
            if not self._length:
                raise DataError("a streaming source has no samples; give another one")
        else:
            self._next = first + len(rows)
        if self._shuffle:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch, number, self._part]))
            rows = [rows[place] for place in generator.permutation(len(rows))]
        if rows:
            self._block = ((epoch, number), rows)
        return rows


class Mixture:
    """Several streams in fixed shares: rounds of `counts[i]` samples of stream i, interleaved anew in each round.

    The k-th sample of stream i in round r is its position r * counts[i] + k, so each stream is gone through evenly. Who
    is next is a permutation by NumPy's PCG64 with seed (seed, r, 0, 1); without shuffling, the samples of each
    stream are spread evenly over the round.

    Args:
        parts: the streams.
        counts: samples of each in a round, at least 1.
        seed: at least 0.
        shuffle: see above.
        is_epoch: whether a round is an epoch.
    """

    def __init__(
        self, parts: Sequence[SampleStream], counts: Sequence[int], seed: int, shuffle: bool, is_epoch: bool
    ) -> None:
        self._parts, self._counts = list(parts), list(counts)
        self._seed, self._shuffle, self._is_epoch = seed, shuffle, is_epoch
        self._round_size = sum(counts)
        self._round: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of a round."""
        return self._round_size if self._is_epoch else None

    def read(self, position: int) -> Sample:
        """See `SampleStream`."""
        part, place = self._place(position)
        return self._parts[part].read(place)

    def where(self, position: int) -> str:
        """See `SampleStream`."""
        part, place = self._place(position)
        return self._parts[part].where(place)

    def row(self, position: int) -> tuple[int, int] | None:
        """See `SampleStream`."""
        part, place = self._place(position)
        found = self._parts[part].row(place)
        return None if found is None else (part, found[1])

    def _place(self, position: int) -> tuple[int, int]:
        if position < 0:
            raise DataError(f"cannot read position {position}; it must be 0 or more")
        number, offset = divmod(position, self._round_size)
        if self._round is None or self._round[0] != number:
            self._round = (number, *self._order(number))
        part = int(self._round[1][offset])
        return part, number * self._counts[part] + int(self._round[2][offset])

    def _order(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """For each position of a round its stream, and how many samples of this stream came before in the round."""
        kind = np.min_scalar_type(len(self._counts))
        order = np.repeat(np.arange(len(self._counts), dtype=kind), self._counts)
        if self._shuffle:
            order = np.random.Generator(np.random.PCG64([self._seed, number, 0, 1])).permutation(order)
        else:
            times = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts])
            order = order[np.argsort(times, kind="stable")]
        before = np.empty(len(order), dtype=np.int64)
        for part, count in enumerate(self._counts):
            before[order == part] = np.arange(count)
        return order, before


def largest_remainders(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided by weights: each share rounded down, and what is left given to the largest remainders (Hamilton's
    method); equal remainders go to the first."""
    shares = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda place: counts[place] - shares[place])
    for place in by_remainder[: total - sum(counts)]:
        counts[place] += 1
    return counts
