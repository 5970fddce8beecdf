"""The one endless order of a run's training samples, a function of the seed and the position alone.

Every rank and worker computes the same order, so a resumed run continues after the samples that it consumed, without
the state of a sampler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_wrap.data.sources.rows import Rows, RowStream, Sample, converted
from megatron_wrap.errors import DataError


class EpochSampler:
    """An endless stream of sample indices, epoch by epoch, with each sample once per epoch.

    The sampler has no state: a resumed run reads from position `consumed_samples`. Epoch e is the permutation by
    NumPy's PCG64 with seed (seed, e); it does not depend on ranks, batch sizes or layouts.

    Args:
        num_samples: global number of samples in the dataset.
        seed: at least 0.
        shuffle: False: the order of the file in every epoch.
        part: number of this dataset in a mixture, from 1, so that equally long datasets have different orders; the
            seed of epoch e is then (seed, e, part). 0: no mixture.

    Raises:
        DataError: no samples.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True, part: int = 0) -> None:
        if num_samples < 1:
            raise DataError(f"the dataset has {num_samples} samples; it needs at least 1")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.part = part
        self._cached: tuple[int, np.ndarray] | None = None

    def index(self, position: int) -> int:
        """The global index of the sample at a position of the stream over all epochs, from 0 on."""
        epoch, offset = divmod(position, self.num_samples)
        return int(self._order(epoch)[offset]) if self.shuffle else offset

    def _order(self, epoch: int) -> np.ndarray:
        """All sample indices in the order of this epoch (from 0): int64 [num_samples]."""
        if self._cached is None or self._cached[0] != epoch:
            # NumPy takes (seed, e, 0) for (seed, e)
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch, self.part]))
            # only the last one: a run stays in one epoch for a long time
            self._cached = (epoch, generator.permutation(np.arange(self.num_samples, dtype=np.int64)))
        return self._cached[1]


class SourceRow(NamedTuple):
    """The source and row that a sample was read from; both count from 0."""

    source: int
    row: int


class SampleStream(Protocol):
    """An endless sequence of samples.

    Reading successive positions takes constant time each. A streaming source reads the rows that a jump skips, and
    starts again for a jump back. Use one object in each process and thread.
    """

    @property
    def samples_per_epoch(self) -> int | None:
        """Positions of an epoch; None: not known, because a source streams."""

    def read(self, position: int) -> Sample:
        """The sample at `position`, from 0 on, over all epochs.

        Raises:
            BadSample: this row cannot be used; the message begins with its file and row. The others can be read.
            DataError: the source cannot be read at all.
        """

    def where(self, position: int) -> str:
        """`FILE:ROW` of the sample at `position`, for messages."""

    def row(self, position: int) -> SourceRow | None:
        """Source and row of the sample at `position`; None if the source has no random access."""


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
        sample: Sample = self._rows[self._index(position)]
        return sample

    def where(self, position: int) -> str:
        """See `SampleStream`."""
        return self._rows.where(self._index(position))

    def row(self, position: int) -> SourceRow:
        """See `SampleStream`."""
        return SourceRow(0, self._index(position))

    def _index(self, position: int) -> int:
        return self._sampler.index(position)


class ShuffledBlocks:
    """All rows of a streaming source, epoch after epoch, shuffled in blocks.

    The k-th block of epoch e has rows [k * block, (k + 1) * block) of the source, permuted by NumPy's PCG64 with seed
    (seed, e, k, part); the last one of an epoch may be smaller. One block is in memory.

    Args:
        rows: the source.
        convert: from a row to a sample; the messages of its DataErrors have no file and row.
        seed: at least 0.
        shuffle: False: the order of the source.
        block: rows of a block, at least 1.
        part: number of the source in a mixture from 1 on; 0: no mixture.
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
        self._rows, self._convert = rows, convert
        self._seed, self._shuffle, self._block_size, self._part = seed, shuffle, block, part
        self._length: int | None = None
        self._block: tuple[tuple[int, int], list[tuple[str, Any]]] | None = None
        self._iterator: Iterator[tuple[str, Any]] = iter(())
        self._next = -1  # the row that the iterator yields next; -1: none
        self._process = os.getpid()

    @property
    def samples_per_epoch(self) -> None:
        """None: the number is not known before the end is read."""
        return None

    def read(self, position: int) -> Sample:
        """See `SampleStream`."""
        where, row = self._at(position)
        sample: Sample = converted(self._convert, row, lambda: where)
        return sample

    def where(self, position: int) -> str:
        """See `SampleStream`."""
        return self._at(position)[0]

    def row(self, position: int) -> None:
        """See `SampleStream`."""
        return None

    def _at(self, position: int) -> tuple[str, Any]:
        for _ in range(2):  # the first attempt may find the end of the source
            epoch, offset = divmod(position, self._length) if self._length else (0, position)
            block = self._load(epoch, offset // self._block_size)
            if offset % self._block_size < len(block) and (self._length is None or offset < self._length):
                return block[offset % self._block_size]
        raise AssertionError("a source of known length has every row of an epoch")

    def _load(self, epoch: int, number: int) -> list[tuple[str, Any]]:
        """The rows of a block in their permuted order; empty after the end of the source, which is then known."""
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
            rows = [rows[index] for index in generator.permutation(len(rows))]
        if rows:
            self._block = ((epoch, number), rows)
        return rows


class Mixture:
    """Several streams in fixed shares: each cycle has `counts[i]` samples of stream i, interleaved.

    The k-th sample of stream i in cycle c is its position c * counts[i] + k, so each stream is consumed evenly. The
    order of the streams in a cycle is a permutation by NumPy's PCG64 with seed (seed, c, 0, 1); without shuffling, the
    samples of each stream are spread evenly.

    Args:
        parts: the streams.
        counts: samples of each in a cycle, at least 1.
        seed: at least 0.
        shuffle: see above.
        is_epoch: whether a cycle is an epoch.
    """

    def __init__(
        self, parts: Sequence[SampleStream], counts: Sequence[int], seed: int, shuffle: bool, is_epoch: bool
    ) -> None:
        self._parts, self._counts = list(parts), list(counts)
        self._seed, self._shuffle, self._is_epoch = seed, shuffle, is_epoch
        self._cycle_size = sum(counts)
        self._cycle: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of a cycle; None if it is no epoch."""
        return self._cycle_size if self._is_epoch else None

    def read(self, position: int) -> Sample:
        """See `SampleStream`."""
        part, index = self._locate(position)
        return self._parts[part].read(index)

    def where(self, position: int) -> str:
        """See `SampleStream`."""
        part, index = self._locate(position)
        return self._parts[part].where(index)

    def row(self, position: int) -> SourceRow | None:
        """See `SampleStream`."""
        part, index = self._locate(position)
        located = self._parts[part].row(index)
        return None if located is None else SourceRow(part, located.row)

    def _locate(self, position: int) -> tuple[int, int]:
        """The stream of a position, and the position in that stream."""
        number, offset = divmod(position, self._cycle_size)
        if self._cycle is None or self._cycle[0] != number:
            self._cycle = (number, *self._order(number))
        part = int(self._cycle[1][offset])
        return part, number * self._counts[part] + int(self._cycle[2][offset])

    def _order(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """For each position of a cycle its stream, and the number of earlier samples of that stream in the cycle."""
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
    """Divide `total` in proportion to weights: each share is rounded down, and the rest goes to the largest remainders
    (Hamilton's method), of equal remainders to the first."""
    shares = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
