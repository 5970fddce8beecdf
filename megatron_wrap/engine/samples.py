"""Which samples of a global batch belong to which replica and micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_wrap.errors import DataError
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects
from megatron_wrap.parallel.state import ParallelState


def shared_batch(
    batch: Sequence[Any] | None, parallel: ParallelState, agreed: dict[str, Any], caller: str
) -> Sequence[Any]:
    """The global batch on every rank: given on each, or on global rank 0 alone while the others pass None.

    Who gives it is agreed on in the first call of each `caller` and has to stay so, which keeps a collective out of
    every step.

    Raises:
        DataError: a rank other than 0 gives samples while another does not, or a rank changes its habit.
    """
    key = f"samples of {caller}"
    given = batch is not None
    if parallel.world.size == 1:
        if batch is None:
            raise DataError(f"wrap.{caller}: samples are None, and there is no other process that could give them")
        return batch
    if key not in agreed:
        all_given = gather_objects(given)
        if not all_given[0] or len(set(all_given[1:])) > 1:
            without = [rank for rank, has in enumerate(all_given) if not has]
            raise DataError(
                f"wrap.{caller}: rank(s) {without} pass None; give the samples on every rank, or on global rank 0 "
                "alone with None on all others"
            )
        agreed[key] = (given, not all(all_given))
    habit, broadcast = agreed[key]
    if given != habit:
        raise DataError(
            f"wrap.{caller}: rank {parallel.world.rank} passes {'samples' if given else 'None'}, unlike in its first "
            "call; keep one way for the whole run"
        )
    if broadcast:
        batch = broadcast_object(list(batch) if batch is not None else None, source_rank=0)
    assert batch is not None
    return batch


def micro_batch_samples(
    batch: Sequence[Any], micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[tuple[int, Sequence[Any]]]:
    """This replica's micro-batches: (index of the first sample in the global batch, samples).

    Micro-batch m of replica r holds the samples from (m * dp_size + r) * micro_batch_size on, so that the first
    micro-batches of all replicas together are the head of the batch.
    """
    starts = range(dp_rank * micro_batch_size, len(batch), dp_size * micro_batch_size)
    return [(start, batch[start : start + micro_batch_size]) for start in starts]
