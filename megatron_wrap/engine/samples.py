"""Which samples of a global batch belong to which replica and micro-batch, and which process gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wrap.errors import DataError
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects
from megatron_wrap.parallel.state import Axis


@dataclass(frozen=True)
class _Source:
    """Who gives the samples of one call."""

    here: bool
    """This rank does."""
    broadcast: bool
    """Global rank 0 alone does, and sends them to the others."""


class SampleSharing:
    """The global batch on every rank: given on each, or on global rank 0 alone while the others pass None.

    Who gives it is agreed on in the first use of each call and has to stay so, which keeps a collective out of every
    step.

    Args:
        world: all processes of the run.
    """

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._sources: dict[str, _Source] = {}

    def share(self, batch: Sequence[Any] | None, caller: str) -> Sequence[Any]:
        """The batch, on every rank. Collective.

        Args:
            caller: the call, such as "train", for messages; each has a source of its own.

        Raises:
            DataError: a rank other than 0 gives samples while another does not, or a rank changes what it does.
        """
        given = batch is not None
        if self._world.size == 1:
            if batch is None:
                raise DataError(f"wrap.{caller}: samples are None, and there is no other process that could give them")
            return batch
        if caller not in self._sources:
            self._sources[caller] = _agreed_source(given, caller)
        source = self._sources[caller]
        if given != source.here:
            raise DataError(
                f"wrap.{caller}: rank {self._world.rank} passes {'samples' if given else 'None'}, unlike in its first "
                "call; keep one way for the whole run"
            )
        if source.broadcast:
            batch = broadcast_object(list(batch) if batch is not None else None, source_rank=0)
        assert batch is not None
        return batch


def _agreed_source(given: bool, caller: str) -> _Source:
    everywhere = gather_objects(given)
    if not everywhere[0] or len(set(everywhere[1:])) > 1:
        without = [rank for rank, has in enumerate(everywhere) if not has]
        raise DataError(
            f"wrap.{caller}: rank(s) {without} pass None; give the samples on every rank, or on global rank 0 "
            "alone with None on all others"
        )
    return _Source(here=given, broadcast=not all(everywhere))


def micro_batch_samples(
    batch: Sequence[Any], micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[tuple[int, Sequence[Any]]]:
    """This replica's micro-batches: (index of the first sample in the global batch, samples).

    Micro-batch m of replica r holds the samples from (m * dp_size + r) * micro_batch_size on, so that the first
    micro-batches of all replicas together are the head of the batch.
    """
    starts = range(dp_rank * micro_batch_size, len(batch), dp_size * micro_batch_size)
    return [(start, batch[start : start + micro_batch_size]) for start in starts]
