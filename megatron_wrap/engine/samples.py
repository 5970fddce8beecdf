"""Assignment of a global batch's samples to replicas and micro-batches, and which process provides the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wrap.engine.prepared import PreparedBatch
from megatron_wrap.errors import DataError
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects
from megatron_wrap.parallel.state import Axis


@dataclass(frozen=True)
class _Source:
    """Which ranks pass samples to one call."""

    here: bool
    """This rank passes samples."""
    broadcast: bool
    """Only global rank 0 passes samples, and broadcasts them."""


class SampleSharing:
    """Makes the global batch available on every rank: either each rank passes it, or only global rank 0 does and the
    others pass None.

    The ranks agree on one of the two at the first use of each call and must keep to it, which saves a collective in
    every step.

    Args:
        world: all processes of the run.
    """

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._sources: dict[str, _Source] = {}

    def share(self, batch: Sequence[Any] | None, caller: str) -> Sequence[Any]:
        """The batch, on every rank. Collective.

        Args:
            caller: name of the call, such as "train"; the agreement holds for each name separately.

        Raises:
            DataError: only some of the ranks other than 0 pass samples, rank 0 passes none, or a rank changes between
                samples and None.
        """
        given = batch is not None
        if self._world.size == 1:
            if batch is None:
                raise DataError(f"wrap.{caller}: samples are None, and this is the only process; pass samples")
            return batch
        if caller not in self._sources:
            self._sources[caller] = _agreed_source(given, caller)
        source = self._sources[caller]
        if given != source.here:
            raise DataError(
                f"wrap.{caller}: rank {self._world.rank} passes {'samples' if given else 'None'}, unlike in its first "
                "call; pass samples on the same ranks in the whole run"
            )
        if source.broadcast:
            if batch is not None and not isinstance(batch, PreparedBatch):
                batch = list(batch)
            batch = broadcast_object(batch, source_rank=0)
        assert batch is not None
        return batch


def _agreed_source(given: bool, caller: str) -> _Source:
    everywhere = gather_objects(given)
    if not everywhere[0] or len(set(everywhere[1:])) > 1:
        without = [rank for rank, has in enumerate(everywhere) if not has]
        raise DataError(
            f"wrap.{caller}: rank(s) {without} pass None; pass the samples on every rank, or on global rank 0 "
            "only, with None on all others"
        )
    return _Source(here=given, broadcast=not all(everywhere))


def micro_batch_samples(
    batch: Sequence[Any], micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[tuple[int, Sequence[Any]]]:
    """This replica's micro-batches: (index of the first sample in the global batch, samples).

    Micro-batch m of replica r begins at sample (m * dp_size + r) * micro_batch_size, so that the first micro-batches of
    all replicas together are the head of the batch. The last micro-batch may be smaller.
    """
    starts = range(dp_rank * micro_batch_size, len(batch), dp_size * micro_batch_size)
    return [(start, batch[start : start + micro_batch_size]) for start in starts]
