"""Selects the process that provides a batch's samples, and the replica and micro-batch of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_wrap.engine.batches.prepared_batch import PreparedBatch
from megatron_wrap.errors import DataError
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects
from megatron_wrap.parallel.state import Axis, ParallelState


class SampleSharing:
    """Makes the global batch available on every rank: either each rank passes it, or only global rank 0 does and the
    others pass None.

    The ranks agree on one of the two at the first use of each call and keep to it, which saves a collective in every
    step.

    Args:
        world: all processes of the run.
    """

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._passing: dict[str, list[bool]] = {}
        """Name of a call -> for each rank whether it passes samples: all ranks do, or only global rank 0, which
        broadcasts."""

    def share(self, batch: Sequence[Any] | None, caller: str) -> Sequence[Any]:
        """The batch, on every rank. Collective.

        Args:
            caller: name of the call, such as "train"; the agreement holds for each name separately.

        Raises:
            DataError: only some of the ranks other than 0 pass samples, rank 0 passes none, or a rank changes between
                samples and None.
        """
        passes_samples = batch is not None
        if self._world.size == 1:
            if batch is None:
                raise DataError(f"wrap.{caller}: samples are None, and this is the only process; pass samples")
            return batch
        if caller not in self._passing:
            self._passing[caller] = _passing_ranks(passes_samples, caller)
        passing = self._passing[caller]
        if passes_samples != passing[self._world.rank]:
            passed = "samples" if passes_samples else "None"
            raise DataError(
                f"wrap.{caller}: rank {self._world.rank} passes {passed}, unlike in its first call; pass samples on "
                "the same ranks in the whole run"
            )
        if not all(passing):
            if batch is not None and not isinstance(batch, PreparedBatch):
                batch = list(batch)
            batch = broadcast_object(batch, source_rank=0)
        assert batch is not None
        return batch


def _passing_ranks(passes_samples: bool, caller: str) -> list[bool]:
    passing = gather_objects(passes_samples)
    if not passing[0] or len(set(passing[1:])) > 1:
        without = [rank for rank, has in enumerate(passing) if not has]
        raise DataError(
            f"wrap.{caller}: rank(s) {without} pass None; pass the samples on every rank, or on global rank 0 "
            "only, with None on all others"
        )
    return passing


def micro_batch_indices(num_samples: int, micro_batch_size: int, dp: Axis) -> list[range]:
    """The sample indices of each of this replica's micro-batches.

    Micro-batch m of replica r begins at sample (m * dp_size + r) * micro_batch_size, so that the first micro-batches of
    all replicas together are the head of the batch. The last micro-batch may be smaller.
    """
    starts = range(dp.rank * micro_batch_size, num_samples, dp.size * micro_batch_size)
    return [range(start, min(start + micro_batch_size, num_samples)) for start in starts]


def rows_in_order(rows: list[Any], count: int, micro_batch_size: int, parallel: ParallelState) -> list[Any]:
    """Gather the rows of all replicas in the order of the `count` samples: the inverse of `micro_batch_indices`.
    Collective over all ranks.

    Args:
        rows: one for each of this replica's samples; only those of the last stage's tensor-parallel rank 0 are used.
    """
    # every context-parallel rank of a replica has the merged rows; context-parallel rank 0 contributes them
    contributed = rows if parallel.counts_once and parallel.cp.rank == 0 else []
    gathered = gather_objects((parallel.dp.rank, contributed))
    by_replica = {dp_rank: iter(of_rank) for dp_rank, of_rank in gathered if of_rank}
    return [next(by_replica[(index // micro_batch_size) % parallel.dp.size]) for index in range(count)]
