"""The one endless order of a run's training samples, a function of the seed and the position alone.

Every rank and worker computes the same order, and a resumed run reads on from the number of samples that it consumed.
"""

from __future__ import annotations

from typing import Protocol

from megatron_wrap.data.rows import Rows, Sample
from megatron_wrap.data.samplers import EpochSampler


class SampleStream(Protocol):
    """An endless sequence of samples.

    Reading positions one after the other takes constant time each; a streaming source reads over what a jump leaves
    out, and begins anew for a jump back. Use one object in each process and thread.
    """

    samples_per_epoch: int | None
    """Positions of an epoch; None: not known before the end of a streaming source was read."""

    def read(self, position: int) -> Sample:
        """The sample at `position`, from 0 on, over all epochs.

        Raises:
            BadSample: this row cannot be used; the message begins with its file and row. Others can be read.
            DataError: the source cannot be read at all.
        """

    def where(self, position: int) -> str:
        """`FILE:ROW` of the sample at `position`, for messages."""


class ShuffledRows:
    """All rows of one source, epoch after epoch, in the order of `EpochSampler`.

    Args:
        rows: the source.
        seed, shuffle: as in `EpochSampler`.
    """

    def __init__(self, rows: Rows, seed: int, shuffle: bool = True) -> None:
        self._rows = rows
        self._sampler = EpochSampler(len(rows), seed, shuffle)
        self.samples_per_epoch: int | None = len(rows)

    def read(self, position: int) -> Sample:
        """See `SampleStream`."""
        sample: Sample = self._rows[self._place(position)]
        return sample

    def where(self, position: int) -> str:
        """See `SampleStream`."""
        return self._rows.where(self._place(position))

    def _place(self, position: int) -> int:
        return self._sampler.indices(position, 1)[0]
