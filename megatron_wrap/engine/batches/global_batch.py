"""A global batch of samples with its cursor in the training data, and this replica's micro-batches if they were
prepared ahead; the process that provides its samples, and the replica and micro-batch of each sample."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import torch

from megatron_wrap.data.order.batching import Cursor
from megatron_wrap.engine.batches.micro_batch import ReplicaMicroBatches
from megatron_wrap.errors import DataError
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects
from megatron_wrap.parallel.state import Axis, ParallelState

_IMMUTABLE = frozenset({str, bytes, int, float, complex, bool, type(None)})


def batch_key(micro_batching: Hashable, seed: int, dp: Axis) -> Hashable:
    """Everything besides its samples that the micro-batches of a batch depend on, for one flow.

    Args:
        micro_batching: the run's `MicroBatching`.
        seed: that of `split_batch`, which contains the index of the batch's first sample.
    """
    return micro_batching, seed, dp.rank, dp.size


class BatchParts(NamedTuple):
    """The parts of a `PreparedBatch`, as a worker process sends them.

    Attributes:
        samples: of the global batch, as they were read.
        before, after: the cursor in the training data before this batch, and after it.
        bad_rows: the message of each row that was left out while the batch was read.
        micro_batches: this replica's, from `split_batch`.
        key: everything besides the samples that the micro-batches depend on.
        where: `FILE:ROW` of each sample, for messages; empty for a sample of unknown origin; () if all samples are.
        positions: of the samples that were read, in the order of the training data.
    """

    samples: list[Any]
    before: Cursor
    after: Cursor
    bad_rows: tuple[str, ...] = ()
    micro_batches: ReplicaMicroBatches | None = None
    key: Hashable = None
    where: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()


class PreparedBatch(list[Any]):
    """The samples of one global batch; `wrap.train` takes it like any other list.

    A pickled copy has the samples and the cursors, without the micro-batches.
    """

    def __init__(self, parts: BatchParts) -> None:
        super().__init__(parts.samples)
        self.before, self.after, self.bad_rows = parts.before, parts.after, parts.bad_rows
        self.positions = parts.positions
        self._parts = parts
        self._snapshot = None if parts.micro_batches is None else _snapshot(list(self))

    def micro_batches(self, key: Hashable) -> ReplicaMicroBatches | None:
        """The micro-batches; None if they are for another `key`, or a sample was replaced or edited since, so that
        they must be prepared again."""
        is_for = self._parts.micro_batches is not None and key == self._parts.key and self._snapshot == list(self)
        return self._parts.micro_batches if is_for else None

    def with_samples(self, samples: Iterable[Any]) -> PreparedBatch:
        """A batch of other samples with this batch's cursor, such as augmented ones; without micro-batches."""
        samples = list(samples)
        consumed = self.before.consumed + len(samples)
        after = replace(self.after, consumed=consumed, ahead=self.after.position - consumed)
        return PreparedBatch(self._parts_of(samples)._replace(after=after))

    def origins(self, samples: Iterable[Any]) -> tuple[str, ...]:
        """`FILE:ROW` of each sample that was read for this batch, in any order; empty for other samples."""
        known = {id(sample): where for sample, where in zip(self._parts.samples, self._parts.where, strict=False)}
        return tuple(known.get(id(sample), "") for sample in samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedBatch, (self._parts_of(list(self)),)

    def _parts_of(self, samples: list[Any]) -> BatchParts:
        return self._parts._replace(samples=samples, micro_batches=None, key=None, where=self.origins(samples))


def _snapshot(value: Any) -> Any:
    """A value that equals `value` as long as nobody edits it: copies of lists and dictionaries, checksums of the
    rest."""
    if type(value) in _IMMUTABLE:
        return value
    if type(value) is dict:
        return {name: _snapshot(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        if _has_numbers_alone(value) or _IMMUTABLE.issuperset(map(type, value)):  # such as token ids; copied at once
            return value if type(value) is tuple else value.copy()
        return type(value)(_snapshot(item) for item in value)
    return _Checksum(value)


def _has_numbers_alone(values: Sequence[Any]) -> bool:
    """Whether all values are int or float; False: unknown. Takes a fifth of the time of checking each type."""
    try:
        return type(sum(values)) in (int, float)
    except Exception:  # they cannot be added
        return False


class _Checksum:
    """Equals one object while its content is the same: a tensor, an array, or an object that can be pickled. It equals
    no other kind of object, because edits of those cannot be noticed."""

    def __init__(self, value: Any) -> None:
        self._value, self._content = value, _content(value)

    def __eq__(self, other: object) -> bool:
        return other is self._value and self._content is not None and _content(other) == self._content

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any) -> Hashable:
    """Checksum or version of a value, which changes if the value is edited; None if there is none."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu" and not value.is_inference():
        return value._version
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        value = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return zlib.crc32(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data)
    try:
        return hashlib.sha256(pickle.dumps(value)).digest()
    except Exception:  # it cannot be pickled
        return None


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
