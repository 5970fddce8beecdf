"""EpochSampler: each sample once per epoch; a resumed run and random access read the same stream."""

import numpy as np
import pytest

from megatron_wrap.data.order.samplers import EpochSampler
from megatron_wrap.errors import DataError


def indices(sampler, start, count):
    return [sampler.index(position) for position in range(start, start + count)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_contains_each_sample_once(shuffle):
    stream = indices(EpochSampler(37, seed=5, shuffle=shuffle), 0, 37 * 4)
    epochs = [stream[i : i + 37] for i in range(0, len(stream), 37)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (4 if shuffle else 1)


def test_order_is_numpys_permutation_for_seed_and_epoch():
    want = [np.random.Generator(np.random.PCG64([5, epoch])).permutation(37) for epoch in range(3)]
    assert indices(EpochSampler(37, seed=5), 0, 37 * 3) == np.concatenate(want).tolist()


def test_without_shuffle_the_order_is_that_of_the_file():
    assert indices(EpochSampler(3, seed=0, shuffle=False), 1, 6) == [1, 2, 0, 1, 2, 0]


def test_random_access_and_resuming_read_the_same_stream():
    uninterrupted = indices(EpochSampler(37, seed=5), 0, 400)
    batches = [index for start in range(0, 400, 16) for index in indices(EpochSampler(37, seed=5), start, 16)]
    assert batches == uninterrupted
    sampler = EpochSampler(37, seed=5)
    for start in (399, 0, 36, 37, 200, 73, 111):
        assert indices(sampler, start, 1) == uninterrupted[start : start + 1]
        assert indices(sampler, start, 50)[: 400 - start] == uninterrupted[start : start + 50]


def test_stream_continues_after_an_epoch():
    stream = indices(EpochSampler(3, seed=1), 2, 10)
    assert len(stream) == 10
    assert sorted(stream[1:4]) == sorted(stream[4:7]) == [0, 1, 2]
    assert indices(EpochSampler(1, seed=1), 7, 3) == [0, 0, 0]


def test_seeds_differ_and_indices_are_plain_integers():
    assert indices(EpochSampler(50, seed=1), 0, 50) != indices(EpochSampler(50, seed=2), 0, 50)
    assert {type(index) for index in indices(EpochSampler(50, seed=1), 0, 50)} == {int}


def test_an_empty_data_set_is_refused():
    with pytest.raises(DataError, match="0 samples"):
        EpochSampler(0, seed=1)
