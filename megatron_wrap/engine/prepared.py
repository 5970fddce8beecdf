"""A global batch of samples that carries this replica's micro-batches, prepared ahead of the step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from megatron_wrap.data.batching import Cursor
from megatron_wrap.parallel.state import Axis


def batch_key(cut: Hashable, seed: int, dp: Axis) -> Hashable:
    """What the micro-batches of a batch depend on beside its samples, for one flow.

    Args:
        cut: the run's `BatchCut`.
        seed: that of `prepare_batch`, which contains the index of the batch's first sample.
    """
    return cut, seed, dp.rank, dp.size


class PreparedBatch(list[Any]):
    """The samples of one global batch, as they were read; `wrap.train` takes it like any other list.

    A pickled copy has the samples and the cursors, without the micro-batches.

    Args:
        samples: of the global batch.
        before, after: where the order of samples was before this batch, and continues after it.
        bad_rows: the message of each row that was left out on the way.
        micro_batches: this replica's, from `prepare_batch`.
        key: what they depend on beside the samples.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        before: Cursor,
        after: Cursor,
        bad_rows: tuple[str, ...] = (),
        micro_batches: Sequence[Any] | None = None,
        key: Hashable = None,
    ) -> None:
        super().__init__(samples)
        self.before, self.after, self.bad_rows = before, after, bad_rows
        self._micro_batches, self._key = micro_batches, key
        self._unchanged = None if micro_batches is None else _copy(list(self))

    def micro_batches(self, key: Hashable) -> list[Any] | None:
        """The micro-batches; None if they are for another `key`, or a sample was replaced or edited since."""
        if self._micro_batches is None or key != self._key or not _equal(list(self), self._unchanged):
            return None
        return list(self._micro_batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedBatch, (list(self), self.before, self.after, self.bad_rows)


def _copy(value: Any) -> Any:
    """Copies of the lists and dictionaries, with the same leaves. A list whose first item is a leaf has only leaves."""
    if type(value) is dict:
        return {name: _copy(item) for name, item in value.items()}
    if type(value) is list:
        return [_copy(item) for item in value] if value and type(value[0]) in (dict, list) else value.copy()
    return value


def _equal(value: Any, copy: Any) -> bool:
    """Whether a value still equals its `_copy`; leaves are compared by identity first, so tensors are not compared."""
    try:
        return bool(value == copy)
    except Exception:  # two different tensors or arrays
        return False
