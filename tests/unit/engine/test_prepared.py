"""A batch that carries its micro-batches: when they are used, and how a step moves the place in the data."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from megatron_wrap.data.batching import BatchRule, Cursor
from megatron_wrap.engine.epochs import steps_of_epochs
from megatron_wrap.engine.prepared import PreparedBatch
from megatron_wrap.engine.state import Progress

BEFORE, AFTER = Cursor(8, 3, ((10,),), 1), Cursor(10, 2, (), 1)


def batch() -> PreparedBatch:
    samples = [{"messages": [{"role": "user", "content": "a"}], "ids": [1, 2]}, {"pixels": torch.zeros(2)}]
    return PreparedBatch(samples, BEFORE, AFTER, ("f:3: bad",), ["first", "second"], key="key")


def replace_tensor(samples: Any) -> None:
    samples[1]["pixels"] = torch.ones(2)


@pytest.mark.parametrize(
    "edit",
    [
        lambda samples: samples[0]["ids"].append(3),
        lambda samples: samples[0]["messages"][0].update(content="b"),
        lambda samples: samples[1].update(more=1),
        lambda samples: samples.reverse(),
        lambda samples: samples.pop(),
        replace_tensor,
    ],
)
def test_micro_batches_are_for_unchanged_samples_and_the_same_key(edit: Any):
    made = batch()
    assert made.micro_batches("key") == ["first", "second"]
    assert made.micro_batches("other") is None
    edit(made)
    assert made.micro_batches("key") is None


def test_a_pickled_copy_has_samples_and_places_alone():
    copy = pickle.loads(pickle.dumps(batch()))
    assert (copy.before, copy.after, copy.bad_rows, copy[0]) == (BEFORE, AFTER, ("f:3: bad",), batch()[0])
    assert copy.micro_batches("key") is None


def at(cursor: Cursor) -> Progress:
    return Progress(consumed_samples=cursor.consumed, data=cursor.saved())


def test_a_step_moves_the_place_in_the_data():
    progress = at(BEFORE)
    progress.consume(batch(), None)
    assert (progress.consumed_samples, progress.data, progress.skipped_samples) == (10, AFTER.saved(), 1)
    copied = at(BEFORE)
    copied.consume(list(batch()), offered=batch())
    assert copied == progress
    # a list of the caller's own, and a batch that is trained on twice
    for consumed, offered in ((["own"] * 4, batch()), (["own"] * 2, None)):
        own = at(BEFORE)
        own.consume(consumed, offered)
        assert (own.consumed_samples, own.data, own.skipped_samples) == (8 + len(consumed), BEFORE.saved(), 0)
    progress.consume(batch(), batch())
    assert (progress.consumed_samples, progress.data, progress.skipped_samples) == (12, AFTER.saved(), 1)


def test_steps_of_epochs_count_the_last_part_of_a_batch():
    ramp = BatchRule(1, lambda consumed: 2 if consumed < 4 else 4)
    unread: Any = None
    assert [steps_of_epochs(epochs, 10, ramp, unread) for epochs in (0.1, 1, 1.5, 2)] == [1, 4, 5, 6]
