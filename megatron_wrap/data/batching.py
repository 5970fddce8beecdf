"""Which samples form each global batch of a run: a function of the order of the samples, the seed and the rule, so that
every rank and every worker computes the same batches, and a resumed run the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_wrap.data.reader import SampleReader
from megatron_wrap.errors import DataError

_MOST_BAD = 10_000
"""Bad rows in succession after which a source of unknown length is given up."""


@dataclass(frozen=True)
class Cursor:
    """Where the order of a run's samples continues. Positions are those of the `SampleStream`."""

    consumed: int = 0
    """Samples in the batches so far."""
    ahead: int = 0
    """Positions that were read and are not in `consumed`: rows left out, and samples that wait."""
    waiting: tuple[tuple[int, ...], ...] = ()
    """Positions of the samples that were packed and are in no batch yet, pack by pack."""
    windows: int = 0
    """Windows packed so far."""

    @property
    def position(self) -> int:
        """The next position to read."""
        return self.consumed + self.ahead

    def saved(self) -> dict[str, Any]:
        """The part that `consumed` does not imply, of plain values; empty if it implies all."""
        parts = {"ahead": self.ahead, "waiting": [list(pack) for pack in self.waiting], "windows": self.windows}
        return {name: value for name, value in parts.items() if value}

    @classmethod
    def of(cls, consumed: int, saved: Mapping[str, Any]) -> Cursor:
        """The cursor from the samples consumed and a `saved` part; {}: of a run that left out no row and packed none,
        such as one of an older checkpoint."""
        waiting = tuple(tuple(int(place) for place in pack) for pack in saved.get("waiting", ()))
        return cls(consumed, int(saved.get("ahead", 0)), waiting, int(saved.get("windows", 0)))


@dataclass(frozen=True)
class TokenBudget:
    """Batches of about equal numbers of tokens: the samples of a window are packed together, and each batch takes the
    same number of packs, in an order shuffled by the seed and the window."""

    pack: Callable[[Sequence[Sequence[int]]], list[list[int]]]
    """Tokens of each sequence of each sample -> the samples of each pack."""
    packs: int
    """Packs of a batch, over all replicas."""
    window: int
    """Samples that are packed together, at least."""


@dataclass(frozen=True)
class BatchRule:
    """How the samples are cut into global batches."""

    seed: int
    samples_at: Callable[[int], int]
    """Samples consumed so far -> samples of the next batch."""
    budget: TokenBudget | None = None
    """None: batches of `samples_at` samples."""


@dataclass(frozen=True)
class PlannedBatch:
    """The samples of one global batch, before they are read."""

    before: Cursor
    after: Cursor
    positions: tuple[int, ...]
    bad_rows: tuple[str, ...] = ()
    """The message of each row that was left out, in order."""


class BatchPlan:
    """The global batches from a cursor on, one after the other.

    Args:
        reader: reads and checks samples.
        rule: how they are cut.
        cursor: where the run continues.
    """

    def __init__(self, reader: SampleReader, rule: BatchRule, cursor: Cursor) -> None:
        self._reader, self._rule, self.cursor = reader, rule, cursor
        self._prepared_until = 0

    def next(self) -> PlannedBatch:
        """The next global batch.

        Raises:
            DataError: a row cannot be used and is not to be left out, or none of an epoch can.
        """
        bad_rows: list[str] = []
        before = self.cursor
        if self._rule.budget is None:
            positions = self._by_samples(self._rule.samples_at(before.consumed), bad_rows)
        else:
            positions = self._by_tokens(self._rule.budget, bad_rows)
            self._prepare_ahead(self._rule.budget.window, len(positions))
        count = len(positions)
        self.cursor = replace(self.cursor, consumed=before.consumed + count, ahead=self.cursor.ahead - count)
        return PlannedBatch(before, self.cursor, tuple(positions), tuple(bad_rows))

    def _by_samples(self, count: int, bad_rows: list[str]) -> list[int]:
        waiting = [place for pack in self.cursor.waiting for place in pack]
        positions, rest = waiting[:count], tuple(waiting[count:])
        self.cursor = replace(self.cursor, waiting=(rest,) if rest else ())
        return positions + self._read(count - len(positions), bad_rows)

    def _by_tokens(self, budget: TokenBudget, bad_rows: list[str]) -> list[int]:
        while len(self.cursor.waiting) < budget.packs:
            # what is left of the last window is packed again, with the next window
            left = sorted(place for pack in self.cursor.waiting for place in pack)
            pool = left + self._read(budget.window, bad_rows)
            packs = [
                tuple(pool[item] for item in pack)
                for pack in budget.pack([self._reader.lengths(place) for place in pool])
            ]
            order = np.random.Generator(np.random.PCG64([self._rule.seed, self.cursor.windows, 1]))
            shuffled = tuple(packs[place] for place in order.permutation(len(packs)))
            self.cursor = replace(self.cursor, waiting=shuffled, windows=self.cursor.windows + 1)
        taken, rest = self.cursor.waiting[: budget.packs], self.cursor.waiting[budget.packs :]
        self.cursor = replace(self.cursor, waiting=rest)
        return [place for pack in taken for place in pack]

    def _prepare_ahead(self, window: int, count: int) -> None:
        """Prepare some samples of the next window with each batch, so that no batch waits for a whole window."""
        begin = max(self.cursor.position, self._prepared_until)
        end = min(begin + count, self.cursor.position + window)
        for place in range(begin, end):
            with contextlib.suppress(DataError):  # it is raised again when the sample is needed
                self._reader.problem(place)
        self._prepared_until = end

    def _read(self, count: int, bad_rows: list[str]) -> list[int]:
        """The next `count` positions whose samples can be used."""
        start = self.cursor.position
        if not self._reader.checks_rows:
            self.cursor = replace(self.cursor, ahead=self.cursor.ahead + count)
            return list(range(start, start + count))
        positions: list[int] = []
        place, in_succession = start, 0
        most = self._reader.samples_per_epoch or _MOST_BAD
        while len(positions) < count:
            problem = self._reader.problem(place)
            if problem is None:
                positions.append(place)
                in_succession = 0
            else:
                bad_rows.append(problem)
                in_succession += 1
                if in_succession >= most:
                    raise DataError(
                        f"{in_succession} rows in succession cannot be used, and no other is left; {problem}"
                    )
            place += 1
        self.cursor = replace(self.cursor, ahead=self.cursor.ahead + place - start)
        return positions
