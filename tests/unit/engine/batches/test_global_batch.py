"""A global batch: when the micro-batches that it carries are used, how a step moves the cursor in the data, and its
split among replicas. No process group."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from megatron_wrap.data.order.batching import BatchRule, Cursor
from megatron_wrap.engine.batches.global_batch import BatchParts, PreparedBatch, SampleSharing, micro_batch_indices
from megatron_wrap.engine.batches.loader import steps_of_epochs
from megatron_wrap.engine.state.state import Progress
from megatron_wrap.errors import DataError
from megatron_wrap.parallel.state import Axis

BEFORE, AFTER = Cursor(8, 3, ((10,),), 1), Cursor(10, 2, (), 1)


MICRO_BATCHES: Any = object()


class Opaque:
    """A sample's value that only pickle can read."""

    def __init__(self, value: int) -> None:
        self.value = value


def batch() -> PreparedBatch:
    samples = [
        {"messages": [{"role": "user", "content": "a"}], "ids": [1, 2], "mixed": (1, [2, {"a": 1}])},
        {"pixels": torch.zeros(2), "sound": numpy.zeros((2, 2)), "other": Opaque(1)},
    ]
    samples[1] |= {"sparse": torch.eye(2).to_sparse(), "scalar": torch.tensor(True), "half": torch.ones(3).bfloat16()}
    return PreparedBatch(BatchParts(samples, BEFORE, AFTER, ("f:3: bad",), MICRO_BATCHES, key="key"))


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
        lambda samples: samples[0]["mixed"][1][1].update(a=2),
        replace_tensor,
        lambda samples: samples[1]["pixels"].add_(1),
        lambda samples: samples[1]["pixels"].numpy().fill(1),
        lambda samples: samples[1]["sound"].T.__setitem__((0, 1), 1),
        lambda samples: vars(samples[1]["other"]).update(value=2),
        lambda samples: samples[1]["sparse"].mul_(2),
        lambda samples: samples[1]["scalar"].logical_not_(),
        lambda samples: samples[1]["half"].add_(1),
    ],
)
def test_micro_batches_are_for_unchanged_samples_and_the_same_key(edit: Any):
    """Every edit is noticed, also one in place."""
    made = batch()
    assert made.micro_batches("key") is MICRO_BATCHES
    assert made.micro_batches("other") is None
    edit(made)
    assert made.micro_batches("key") is None


def test_values_whose_edits_cannot_be_noticed_are_prepared_again():
    made = PreparedBatch(BatchParts([{"handle": lambda: None}], BEFORE, AFTER, (), MICRO_BATCHES, key="key"))
    assert made.micro_batches("key") is None


def test_a_pickled_copy_has_samples_and_cursors_alone():
    copy = pickle.loads(pickle.dumps(batch()))
    assert (copy.before, copy.after, copy.bad_rows, copy[0]) == (BEFORE, AFTER, ("f:3: bad",), batch()[0])
    assert copy.micro_batches("key") is None


def test_samples_keep_their_origin_in_another_order_and_in_a_copy():
    samples = [{"ids": [row]} for row in range(3)]
    made = PreparedBatch(BatchParts(samples, BEFORE, AFTER, where=("f:1", "f:2", "f:3")))
    made.reverse()
    made[0]["ids"].append(9)
    assert made.origins(made) == ("f:3", "f:2", "f:1")
    copy = pickle.loads(pickle.dumps(made))
    assert copy.origins(copy) == ("f:3", "f:2", "f:1")
    mixed = made.with_samples([samples[1], {"ids": [1]}])
    assert mixed.origins(mixed) == ("f:2", "")


def at(cursor: Cursor) -> Progress:
    return Progress(consumed_samples=cursor.consumed, data=cursor.saved())


def test_a_step_moves_the_cursor_in_the_data():
    progress = at(BEFORE)
    progress.consume(batch())
    assert (progress.consumed_samples, progress.data, progress.skipped_samples) == (10, AFTER.saved(), 1)
    of_user = at(BEFORE)
    of_user.consume(["sample"] * 4)
    assert (of_user.consumed_samples, of_user.data, of_user.skipped_samples) == (12, BEFORE.saved(), 0)
    progress.consume(batch())  # trained on twice
    assert (progress.consumed_samples, progress.data, progress.skipped_samples) == (12, AFTER.saved(), 1)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_other_samples_instead_of_a_batch_continue_after_it(count: int):
    """Whatever their number, the next sample that is read is that after the batch."""
    progress = at(BEFORE)
    progress.consume(batch().with_samples(["augmented"] * count))
    assert (progress.consumed_samples, progress.skipped_samples) == (8 + count, 1)
    assert progress.cursor.position == AFTER.position
    assert replace(progress.cursor, consumed=10, ahead=2) == AFTER


def test_steps_of_epochs_count_the_last_part_of_a_batch():
    ramp = BatchRule(1, lambda consumed: 2 if consumed < 4 else 4)
    unread: Any = None
    assert [steps_of_epochs(epochs, 10, ramp, unread) for epochs in (0.1, 1, 1.5, 2)] == [1, 4, 5, 6]


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
