"""Split of a global batch into micro-batches. No process group."""

from __future__ import annotations

import pytest

from megatron_wrap.engine.samples import SampleSharing, micro_batch_samples
from megatron_wrap.errors import DataError
from megatron_wrap.parallel.state import Axis

ALONE = Axis(1, 0, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 5, 8, 11, 12])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_sample_is_in_one_micro_batch_and_replicas_differ_by_at_most_one_micro_batch(count, size, dp_size):
    batch = list(range(count))
    cuts = [micro_batch_samples(batch, size, rank, dp_size) for rank in range(dp_size)]
    assert sorted(sample for cut in cuts for _, samples in cut for sample in samples) == batch
    for cut in cuts:
        assert all(samples[0] == start for start, samples in cut)
        assert all(len(samples) == size for _, samples in cut[:-1])
    assert len(cuts[0]) - len(cuts[-1]) in (0, 1)


def test_micro_batches_do_not_depend_on_the_number_of_replicas():
    batch = list(range(24))
    alone = micro_batch_samples(batch, 2, 0, 1)
    spread = [cut for rank in range(3) for cut in micro_batch_samples(batch, 2, rank, 3)]
    assert sorted(spread) == alone


def test_one_process_must_pass_samples():
    assert SampleSharing(ALONE).share([1, 2], "train") == [1, 2]
    with pytest.raises(DataError, match=r"wrap\.train: .*None.*pass samples"):
        SampleSharing(ALONE).share(None, "train")
