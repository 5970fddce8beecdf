"""Selects the samples of each global batch of a run: a function of their order, the seed and the rule, so that all
ranks and workers compute the same batches, and a resumed run continues with the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_wrap.data.order.sample_reader import SampleReader
from megatron_wrap.errors import DataError
from megatron_wrap.metrics.number_format import counted

_MOST_BAD = 10_000
"""Number of successive bad rows after which the run ends, for a source of unknown length."""


@dataclass(frozen=True)
class Cursor:
    """The point at which the order of a run's samples continues. Positions are those of the `SampleStream`."""

    consumed: int = 0
    """Number of samples in the batches so far."""
    ahead: int = 0
    """Number of positions that were read and are not in `consumed`: rows left out, and samples in `waiting`."""
    waiting: tuple[tuple[int, ...], ...] = ()
    """Positions of the samples of each bin that is in no batch yet."""
    windows: int = 0
    """Number of windows packed so far."""

    @property
    def position(self) -> int:
        """The next position to read."""
        return self.consumed + self.ahead

    def saved(self) -> dict[str, Any]:
        """The values that `consumed` does not imply, as plain types; empty if it implies all."""
        parts = {
            "ahead": self.ahead,
            "waiting": [list(positions) for positions in self.waiting],
            "windows": self.windows,
        }
        return {name: value for name, value in parts.items() if value}

    @classmethod
    def of(cls, consumed: int, saved: Mapping[str, Any]) -> Cursor:
        """The cursor from the number of consumed samples and `saved` values. Empty values: no row was left out and none
        is waiting."""
        waiting = tuple(tuple(map(int, positions)) for positions in saved.get("waiting", ()))
        return cls(consumed, int(saved.get("ahead", 0)), waiting, int(saved.get("windows", 0)))


@dataclass(frozen=True)
class TokenBudget:
    """Batches of about equal numbers of tokens: the samples of a window are packed into bins, and each batch takes the
    same number of bins, in an order shuffled by the seed and the window."""

    pack: Callable[[Sequence[Sequence[int]]], list[list[int]]]
    """Function: tokens of each sequence of each sample -> the samples of each bin."""
    num_bins: int
    """Number of bins in a batch, over all replicas."""
    window: int
    """Smallest number of samples that are packed together."""


@dataclass(frozen=True)
class BatchRule:
    """The rule by which the samples are divided into global batches."""

    seed: int
    samples_at: Callable[[int], int]
    """Function: samples consumed so far -> number of samples of the next batch."""
    budget: TokenBudget | None = None
    """Budget of batches with about equal numbers of tokens; None: batches of `samples_at` samples."""


@dataclass(frozen=True)
class PlannedBatch:
    """The samples of one global batch, before they are read."""

    before: Cursor
    after: Cursor
    positions: tuple[int, ...]
    bad_rows: tuple[str, ...] = ()
    """The message of each row that was left out, in order."""


class BatchPlan:
    """The global batches from a cursor on.

    Args:
        reader: reads and checks samples.
        rule: how they are divided.
        cursor: of the run.
        left_out: positions that are in no batch.
    """

    def __init__(
        self, reader: SampleReader, rule: BatchRule, cursor: Cursor, left_out: Collection[int] = frozenset()
    ) -> None:
        self._reader, self._rule, self.cursor, self._left_out = reader, rule, cursor, left_out
        self._prepared_until = 0

    def next(self) -> PlannedBatch:
        """The next global batch.

        Raises:
            DataError: a row cannot be used and bad rows are not left out, or no row of an epoch can.
        """
        bad_rows: list[str] = []
        before = self.cursor
        if self._left_out:  # samples of a checkpoint's cursor may have been left out since
            bins = (tuple(item for item in items if item not in self._left_out) for items in before.waiting)
            self.cursor = replace(before, waiting=tuple(items for items in bins if items))
        if self._rule.budget is None:
            positions = self._by_samples(self._rule.samples_at(before.consumed), bad_rows)
        else:
            positions = self._by_tokens(self._rule.budget, bad_rows)
            self._prepare_ahead(self._rule.budget.window, len(positions))
        count = len(positions)
        self.cursor = replace(self.cursor, consumed=before.consumed + count, ahead=self.cursor.ahead - count)
        return PlannedBatch(before, self.cursor, tuple(positions), tuple(bad_rows))

    def _by_samples(self, count: int, bad_rows: list[str]) -> list[int]:
        waiting = [position for positions in self.cursor.waiting for position in positions]
        positions, rest = waiting[:count], tuple(waiting[count:])
        self.cursor = replace(self.cursor, waiting=(rest,) if rest else ())
        return positions + self._read(count - len(positions), bad_rows)

    def _by_tokens(self, budget: TokenBudget, bad_rows: list[str]) -> list[int]:
        while len(self.cursor.waiting) < budget.num_bins:
            # the rest of the last window is packed again, with the next window
            rest = sorted(position for positions in self.cursor.waiting for position in positions)
            pool = rest + self._read(budget.window, bad_rows)
            bins = budget.pack([self._reader.lengths(position) for position in pool])
            order = np.random.Generator(np.random.PCG64([self._rule.seed, self.cursor.windows, 1]))
            shuffled = tuple(tuple(pool[item] for item in bins[index]) for index in order.permutation(len(bins)))
            self.cursor = replace(self.cursor, waiting=shuffled, windows=self.cursor.windows + 1)
        batch, waiting = self.cursor.waiting[: budget.num_bins], self.cursor.waiting[budget.num_bins :]
        self.cursor = replace(self.cursor, waiting=waiting)
        return [position for positions in batch for position in positions]

    def _prepare_ahead(self, window: int, count: int) -> None:
        """Prepare some samples of the next window with each batch, so that no batch waits for a whole window."""
        begin = max(self.cursor.position, self._prepared_until)
        end = min(begin + count, self.cursor.position + window)
        for position in range(begin, end):
            with contextlib.suppress(DataError):  # it is raised again when the sample is needed
                self._reader.problem(position)
        self._prepared_until = end

    def _read(self, count: int, bad_rows: list[str]) -> list[int]:
        """The next `count` positions whose samples can be used."""
        start = self.cursor.position
        if not self._reader.checks_rows and not self._left_out:
            self.cursor = replace(self.cursor, ahead=self.cursor.ahead + count)
            return list(range(start, start + count))
        positions: list[int] = []
        position, in_succession = start, 0
        most = self._reader.samples_per_epoch or _MOST_BAD
        while len(positions) < count:
            is_left_out = position in self._left_out
            problem = self._reader.problem(position) if self._reader.checks_rows and not is_left_out else None
            if is_left_out:
                in_succession = 0
            elif problem is None:
                positions.append(position)
                in_succession = 0
            else:
                bad_rows.append(problem)
                in_succession += 1
                if in_succession >= most:
                    raise DataError(
                        f"{counted(in_succession, 'row')} in succession cannot be used, and no other is left; {problem}"
                    )
            position += 1
        self.cursor = replace(self.cursor, ahead=self.cursor.ahead + position - start)
        return positions
