"""The order of training samples: exact shares of a mixture, blocks of a streaming source, and resuming anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_wrap.data.order.stream import (
    EpochSampler,
    Mixture,
    SampleStream,
    ShuffledBlocks,
    ShuffledRows,
    largest_remainders,
)
from megatron_wrap.data.sources.rows import BadSample, ListedRows, StreamOfRows
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


def rows(name: str, count: int) -> ListedRows:
    return ListedRows([{"id": (name, number)} for number in range(count)], name)


def blocks(count: int, block: int, seed: int = 3, shuffle: bool = True, name: str = "s") -> ShuffledBlocks:
    return ShuffledBlocks(StreamOfRows(rows(name, count)), dict, seed, shuffle, block)


def mixture(counts: dict[str, tuple[int, int]], seed: int = 5, shuffle: bool = True) -> Mixture:
    """Name -> (rows of the source, samples of it in an epoch)."""
    parts = [
        ShuffledRows(rows(name, length), seed, shuffle, part + 1)
        for part, (name, (length, _)) in enumerate(counts.items())
    ]
    return Mixture(parts, [count for _, count in counts.values()], seed, shuffle, is_epoch=True)


def ids(stream: SampleStream, positions: range) -> list[Any]:
    return [stream.read(position)["id"] for position in positions]


MAKE = {
    "one source": lambda: ShuffledRows(rows("a", 7), 5),
    "mixture": lambda: mixture({"a": (7, 9), "b": (5, 2), "c": (1, 3)}),
    "streaming": lambda: blocks(23, 5),
    "streaming, whole blocks": lambda: blocks(20, 5),
    "streaming, one block": lambda: blocks(4, 50),
    "streaming mixture": lambda: Mixture([blocks(11, 4), ShuffledRows(rows("b", 3), 5)], [3, 1], 5, True, False),
}


@pytest.mark.parametrize("kind", MAKE)
def test_resuming_at_any_position_equals_the_straight_stream(kind: str) -> None:
    straight = ids(MAKE[kind](), range(70))
    assert len(set(straight[:20])) > 3
    for position in range(0, 70, 3):
        resumed = MAKE[kind]()
        assert ids(resumed, range(position, min(position + 9, 70))) == straight[position : position + 9]
    back_and_forth = MAKE[kind]()
    for position in (60, 0, 61, 22, 23, 24, 3, 69, 20, 19):
        assert back_and_forth.read(position)["id"] == straight[position]
        assert back_and_forth.where(position).endswith(f":{straight[position][1] + 1}")


def test_one_source_has_the_order_of_the_epoch_sampler() -> None:
    stream = ShuffledRows(rows("a", 13), 5)
    assert [number for _, number in ids(stream, range(40))] == [*map(EpochSampler(13, 5).index, range(40))]
    assert stream.samples_per_epoch == 13


def test_a_mixture_has_exact_counts_in_each_epoch_and_goes_evenly_through_its_sources() -> None:
    counts = {"a": (7, 9), "b": (5, 2), "c": (4, 4)}
    stream = mixture(counts)
    assert stream.samples_per_epoch == 15
    read = ids(stream, range(15 * 20))
    for epoch in range(20):
        result = Counter(name for name, _ in read[epoch * 15 : (epoch + 1) * 15])
        assert result == {"a": 9, "b": 2, "c": 4}
    for part, (name, (length, _)) in enumerate(counts.items()):
        numbers = [number for source, number in read if source == name]
        assert numbers == [*map(EpochSampler(length, 5, part=part + 1).index, range(len(numbers)))]
    assert len({tuple(name for name, _ in read[e * 15 : (e + 1) * 15]) for e in range(20)}) > 15


def test_the_sources_of_a_mixture_have_orders_of_their_own_and_the_seed_changes_all() -> None:
    read = ids(mixture({"a": (20, 20), "b": (20, 20)}), range(40))
    first, second = ([number for source, number in read if source == name] for name in "ab")
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    assert read != ids(mixture({"a": (20, 20), "b": (20, 20)}, seed=6), range(40))


def test_a_mixture_without_shuffling_spreads_its_sources_evenly() -> None:
    read = ids(mixture({"a": (6, 6), "b": (3, 3)}, shuffle=False), range(9))
    assert [number for name, number in read if name == "a"] == list(range(6))
    assert "".join(name for name, _ in read) == "abaabaaba"


@pytest.mark.parametrize("length", [20, 23, 3])
def test_a_streaming_source_is_the_order_of_the_file_in_permuted_blocks(length: int) -> None:
    read = [number for _, number in ids(blocks(length, 5), range(3 * length))]
    unshuffled = [number for _, number in ids(blocks(length, 5, shuffle=False), range(3 * length))]
    assert unshuffled == list(range(length)) * 3
    for epoch in range(3):
        for number, begin in enumerate(range(0, length, 5)):
            block = list(range(begin, min(begin + 5, length)))
            order = np.random.Generator(np.random.PCG64([3, epoch, number])).permutation(len(block))
            start = epoch * length + begin
            assert read[start : start + len(block)] == [block[position] for position in order]


class CountedStream:
    """Counts how often the source is opened and how many rows are read."""

    def __init__(self, count: int) -> None:
        self.count, self.opened, self.read = count, 0, 0
        self.length: int | None = None

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        self.opened += 1
        for number in range(index, self.count):
            self.read += 1
            yield f"s:{number + 1}", {"id": ("s", number)}
        self.length = self.count


def test_sequential_reading_reads_each_row_once_in_an_epoch() -> None:
    source = CountedStream(1000)
    stream = ShuffledBlocks(source, dict, 1, block=64)
    for position in range(3000):
        stream.read(position)
    assert source.read == 3000
    assert source.opened == 3
    later = CountedStream(1000)
    ShuffledBlocks(later, dict, 1, block=64).read(640)
    assert later.read == 64  # a source that can skip does


def test_a_malformed_row_of_a_block_leaves_the_others_readable() -> None:
    class WithBadRow(CountedStream):
        def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
            for where, row in super().start_at(index):
                yield where, BadSample(f"{where}: bad") if row["id"][1] == 4 else row

    stream = ShuffledBlocks(WithBadRow(10), dict, 1, block=5)
    bad = next(position for position in range(10) if stream.where(position) == "s:5")
    with pytest.raises(BadSample, match="s:5: bad"):
        stream.read(bad)
    result = [stream.read(position)["id"][1] for position in range(10) if position != bad]
    assert sorted(result) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        blocks(0, 5).read(0)


def test_largest_remainders() -> None:
    assert largest_remainders([1, 1, 1], 10) == [4, 3, 3]
    assert largest_remainders([47000, 16000, 15800, 12000, 6100, 3100], 10) == [5, 2, 1, 1, 1, 0]  # Wikipedia's example
    assert largest_remainders([0.5, 0.25, 0.25], 8) == [4, 2, 2]
