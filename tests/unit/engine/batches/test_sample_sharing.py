"""Split of a global batch into micro-batches. No process group."""

from __future__ import annotations

import pytest

from megatron_wrap.engine.batches.sample_sharing import SampleSharing, micro_batch_indices
from megatron_wrap.errors import DataError
from megatron_wrap.parallel.state import Axis


def axis(size: int, rank: int) -> Axis:
    return Axis(size, rank, None)  # type: ignore[arg-type]


ALONE = axis(1, 0)


@pytest.mark.parametrize("count", [1, 5, 8, 11, 12])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_sample_is_in_one_micro_batch_and_replicas_differ_by_at_most_one_micro_batch(count, size, dp_size):
    by_replica = [micro_batch_indices(count, size, axis(dp_size, rank)) for rank in range(dp_size)]
    assert sorted(index for replica in by_replica for indices in replica for index in indices) == list(range(count))
    for replica in by_replica:
        assert all(len(indices) == size for indices in replica[:-1])
    assert len(by_replica[0]) - len(by_replica[-1]) in (0, 1)


def test_micro_batches_do_not_depend_on_the_number_of_replicas():
    alone = micro_batch_indices(24, 2, axis(1, 0))
    spread = [indices for rank in range(3) for indices in micro_batch_indices(24, 2, axis(3, rank))]
    assert sorted(spread, key=lambda indices: indices[0]) == alone


def test_one_process_must_pass_samples():
    assert SampleSharing(ALONE).share([1, 2], "train") == [1, 2]
    with pytest.raises(DataError, match=r"wrap\.train: .*None.*pass samples"):
        SampleSharing(ALONE).share(None, "train")
