"""The samples of each global batch: by number and by tokens, with rows that are left out, from any cursor on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_wrap.data.order.batching import BatchPlan, BatchRule, Cursor, PlannedBatch, TokenBudget
from megatron_wrap.data.order.bin_packing import fewest_bins
from megatron_wrap.data.order.sample_reader import Preparation, SampleReader
from megatron_wrap.data.order.sample_sets import stream_of
from megatron_wrap.errors import DataError

LENGTHS = [1 + (7 * position) % 19 for position in range(50)]
CAPACITY = 24


def refusing(bad: Sequence[int]) -> Callable[[int], int]:
    def prepare(sample: int) -> int:
        if sample in bad:
            raise DataError(f"{sample} is bad")
        return sample

    return prepare


def reader(bad: Sequence[int] = (), skip_bad: bool = False, by_tokens: bool = False) -> SampleReader:
    preparation = Preparation(refusing(bad), lambda sample: [LENGTHS[sample]])
    return SampleReader(stream_of(range(50), seed=3), preparation, skip_bad, needs_lengths=by_tokens)


def pack(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    return fewest_bins([sum(sequences) for sequences in lengths], CAPACITY)


BY_SAMPLES = BatchRule(5, lambda consumed: 4 if consumed < 8 else 6)
BY_TOKENS = BatchRule(5, lambda consumed: 4, TokenBudget(pack, num_bins=3, window=16))


def plan(rule: BatchRule, cursor: Cursor = Cursor(), **options: Any) -> BatchPlan:  # noqa: B008 - frozen
    return BatchPlan(reader(by_tokens=rule.budget is not None, **options), rule, cursor)


def saved_and_loaded(cursor: Cursor) -> Cursor:
    return Cursor.of(cursor.consumed, json.loads(json.dumps(cursor.saved())))


def test_batches_by_samples_follow_the_stream_and_need_nothing_saved():
    stream, ours = stream_of(range(50), seed=3), plan(BY_SAMPLES)
    batches = [ours.next() for _ in range(20)]
    assert [len(batch.positions) for batch in batches] == [4, 4] + [6] * 18
    assert [position for batch in batches for position in batch.positions] == list(range(116))
    assert [stream.read(position) for position in range(4)] == [ours._reader.sample(position) for position in range(4)]
    assert all(batch.after.saved() == {} for batch in batches)


def test_a_budget_takes_each_sample_once_and_fills_the_bins():
    ours = plan(BY_TOKENS)
    batches = [ours.next() for _ in range(30)]
    taken = [position for batch in batches for position in batch.positions]
    left = [position for positions in ours.cursor.waiting for position in positions]
    assert sorted(taken + left) == list(range(ours.cursor.position))
    stream = stream_of(range(50), seed=3)
    for batch in batches:
        lengths = [LENGTHS[stream.read(position)] for position in batch.positions]
        assert len(fewest_bins(lengths, CAPACITY)) == 3  # splitting the batch produces the same bins
    assert sum(LENGTHS[stream.read(position)] for position in taken) > 0.85 * 30 * 3 * CAPACITY
    assert taken != sorted(taken)


@pytest.mark.parametrize("rule", [BY_SAMPLES, BY_TOKENS], ids=["samples", "tokens"])
@pytest.mark.parametrize("options", [{}, {"bad": (3, 17, 18), "skip_bad": True}], ids=["all", "skip"])
def test_positions_that_are_left_out_are_in_no_batch_and_no_other_is_missing(rule: BatchRule, options: dict[str, Any]):
    """From a cursor with some of them waiting, and then from a later one."""
    before = plan(rule, **options)
    taken = [before.next().positions for _ in range(3)]
    cursor = saved_and_loaded(before.cursor)
    left_out = frozenset({*before.next().positions, cursor.position + 3, 60})
    samples = reader(by_tokens=rule.budget is not None, **options)
    ours = BatchPlan(samples, rule, cursor, left_out)
    batches = [ours.next()]
    assert batches[0].before == cursor
    continued = BatchPlan(samples, rule, saved_and_loaded(ours.cursor), left_out)
    batches += [continued.next() for _ in range(20)]
    later = [position for batch in batches for position in batch.positions]
    assert len(later) == continued.cursor.consumed - cursor.consumed
    waiting = [position for positions in continued.cursor.waiting for position in positions]
    read = range(continued.cursor.position)
    bad = {position for position in read if stream_of(range(50), seed=3).read(position) in options.get("bad", ())}
    earlier = [position for positions in taken for position in positions]
    assert sorted(earlier + later + waiting) == [position for position in read if position not in bad | left_out]


def test_the_samples_of_a_window_are_prepared_over_the_batches_before_it():
    prepared: list[int] = []

    def prepare(sample: int) -> int:
        prepared.append(sample)
        return sample

    samples = SampleReader(
        stream_of(range(2000), seed=3), Preparation(prepare, lambda sample: [LENGTHS[sample % 50]]), needs_lengths=True
    )
    ours = BatchPlan(samples, BatchRule(5, lambda consumed: 4, TokenBudget(pack, num_bins=3, window=80)), Cursor())
    calls = []
    for _ in range(60):
        before = len(prepared)
        samples.forget(ours.next().positions)
        calls.append(len(prepared) - before)
    assert calls[0] > 80
    assert max(calls[1:]) < 24
    assert len(prepared) == len(set(prepared))


@pytest.mark.parametrize("rule", [BY_SAMPLES, BY_TOKENS], ids=["samples", "tokens"])
@pytest.mark.parametrize("options", [{}, {"bad": (3, 17, 18), "skip_bad": True}], ids=["all", "skip"])
def test_every_cursor_continues_the_straight_run(rule: BatchRule, options: dict[str, Any]):
    ours = plan(rule, **options)
    straight = [ours.next() for _ in range(25)]
    for position in (1, 7, 24):
        rest = plan(rule, saved_and_loaded(straight[position].before), **options)
        assert [rest.next() for _ in straight[position:]] == straight[position:]


def test_rows_left_out_are_replaced_by_the_next_ones_and_named():
    ours = plan(BY_SAMPLES, bad=(3, 17, 18), skip_bad=True)
    batches = [ours.next() for _ in range(9)]  # 50 samples
    stream = stream_of(range(50), seed=3)
    taken = [stream.read(position) for batch in batches for position in batch.positions]
    assert not {3, 17, 18} & set(taken[:47])
    assert len(set(taken[:47])) == 47
    texts = [text for batch in batches for text in batch.bad_rows]
    assert texts[:3] == [f"wrap.batches:{bad + 1}: {bad} is bad" for bad in stream_order(stream) if bad in (3, 17, 18)]


def stream_order(stream: Any) -> list[int]:
    return [stream.read(position) for position in range(50)]


def test_a_bad_row_is_an_error_with_its_location_unless_it_is_to_be_left_out():
    with pytest.raises(DataError, match=r"^wrap\.batches:18: 17 is bad$"):
        [plan(BY_TOKENS, bad=(17,)).next() for _ in range(10)]
    with pytest.raises(DataError, match=r"50 rows in succession .*wrap\.batches:\d+: \d+ is bad$"):
        plan(BY_SAMPLES, bad=range(50), skip_bad=True).next()


def test_samples_that_wait_come_first_if_the_budget_is_taken_away():
    ours = plan(BY_TOKENS)
    for _ in range(3):
        ours.next()
    waiting = [position for positions in ours.cursor.waiting for position in positions]
    rest = plan(BY_SAMPLES, ours.cursor)
    taken: list[int] = []
    while len(taken) < len(waiting) + 6:
        taken += rest.next().positions
    assert taken[: len(waiting)] == waiting
    assert taken[len(waiting) :] == list(range(ours.cursor.position, ours.cursor.position + len(taken) - len(waiting)))


def test_a_planned_batch_reads_nothing_if_no_row_is_checked():
    class Unread:
        samples_per_epoch = 50

    unread: Any = Unread()
    ours = BatchPlan(SampleReader(unread, Preparation(refusing(()), len)), BY_SAMPLES, Cursor(consumed=8))
    assert ours.next() == PlannedBatch(Cursor(8), Cursor(14), tuple(range(8, 14)))
