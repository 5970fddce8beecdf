"""Cutting a global batch into the micro-batches of each replica. No process group."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from megatron_wrap.config import load_run_config
from megatron_wrap.engine.batches.micro_batch import MicroBatch, ReplicaMicroBatches, padded_length
from megatron_wrap.engine.batches.micro_batching import (
    MicroBatching,
    micro_batching_of,
    names_by_index,
    prepared_samples,
    split_batch,
)
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow import FlowContext, FlowOptions, LossOutput, MegatronWrapGPTModelFlow
from megatron_wrap.parallel.state import Axis, ParallelState
from megatron_wrap.plan.flops import training_flops
from megatron_wrap.plan.model_parts import model_shape

SHAPE_OF_1B = Path(__file__).parents[4] / "scripts/benchmark/llama-1b.yaml"
MOCK = Path(__file__).parents[4] / "configs/tiny-llama-mock.yaml"
COSTS = {"token_cost": 1.0, "square_cost": 0.01}


class Flow(MegatronWrapGPTModelFlow):
    """A sample is a list of ids; a list of lists has several sequences. `row` has no sequence dimension."""

    def __init__(self, weight: Any = 1.0) -> None:
        context = FlowContext(2, 64, 1000, 1, lambda part: part, lambda value: value, None)
        super().__init__(FlowOptions("test", {}), context)
        self.weight, self.collated = weight, 0

    def collate_data_micro_batch(self, iterator: Any) -> Any:
        samples = [next(iterator) for _ in range(self.micro_batch_size)]
        sequences = [
            torch.tensor(s) for sample in samples for s in (sample if isinstance(sample[0], list) else [sample])
        ]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(sequence)) for sequence in sequences], batch_first=True)
        self.collated += 1
        inputs = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids), "attention_mask": mask}
        return inputs, {"noise": torch.rand(2)}

    def get_loss_weight(self, loss_inputs: Any) -> Any:
        return self.weight

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        raise AssertionError


def axis(size: int, rank: int = 0) -> Axis:
    return Axis(size, rank, None)  # type: ignore[arg-type]


def split(flow: Flow, samples: list[Any], how: MicroBatching, seed: int, dp: Axis) -> ReplicaMicroBatches:
    """Of samples as they were read."""
    names = names_by_index(samples)
    prepared = prepared_samples(flow.prepare_sample, samples, names)
    return split_batch(flow, len(samples), prepared, how, seed, dp, names)


def training(*arguments: Any) -> tuple[MicroBatch, ...]:
    """The micro-batches of `split` to train on."""
    return split(*arguments).training


def batch(count: int, longest: int = 40, seed: int = 3) -> list[list[int]]:
    """Samples of unequal lengths; the first token of each is its index plus 1, the others are 0."""
    generator = random.Random(seed)
    return [[position + 1] + [0] * generator.randint(0, longest - 1) for position in range(count)]


def samples_of(micro_batches: list[Any]) -> list[int]:
    """The samples of counted micro-batches, by their first tokens."""
    ids = [micro_batch.model_inputs["input_ids"] for micro_batch in micro_batches if micro_batch.counted]
    return [int(token) - 1 for tokens in ids for token in tokens.flatten() if token > 0]


def splits(**settings: Any) -> list[MicroBatching]:
    return [MicroBatching(capacity=48, packing=packing, **COSTS, **settings) for packing in (False, True)]


SPLITS = [
    MicroBatching(),
    *splits(),
    *splits(pad_to_multiple_of=4),
    *splits(num_microbatches_multiple=2),
    *splits(pad_to_multiple_of=8, num_microbatches_multiple=3),
]


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("count", [1, 5, 16, 31])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_every_sample_is_in_one_micro_batch_and_all_replicas_have_as_many(how, count, replicas):
    samples = batch(count)
    by_replica = [training(Flow(), samples, how, 0, axis(replicas, rank)) for rank in range(replicas)]
    assert sorted(sample for of_replica in by_replica for sample in samples_of(of_replica)) == list(range(count))
    [number] = {len(of_replica) for of_replica in by_replica}
    if how.capacity is not None:
        assert number % how.num_microbatches_multiple == 0
        for micro_batch in (micro_batch for replica in by_replica for micro_batch in replica if micro_batch.counted):
            assert micro_batch.num_rows * padded_length(micro_batch.width, how.pad_to_multiple_of) <= how.capacity
    counted = sum(
        int(micro_batch.lengths.sum()) for replica in by_replica for micro_batch in replica if micro_batch.counted
    )
    assert counted == sum(map(len, samples))


@pytest.mark.parametrize("packing", [False, True])
def test_no_more_micro_batches_than_needed(packing):
    how = MicroBatching(capacity=48, packing=packing, **COSTS)
    shares = how.assign([[length] for length in (24, 24, 24, 24, 12, 12, 12, 12)], replicas=1)
    assert len(shares[0]) == 3


def test_a_larger_sample_is_a_micro_batch_of_its_own_or_is_refused():
    samples = [[7] * 30, [1, 2], [3, 4], [5, 6]]
    made = training(Flow(), samples, MicroBatching(capacity=16, allow_oversized=True, packing=True), 0, axis(1))
    assert sorted(micro_batch.segments for micro_batch in made) == [(2, 2, 2), (30,)]
    for packing in (False, True):
        with pytest.raises(DataError, match=r"30 tokens.*max_tokens_per_micro_batch 16.*at least 30"):
            training(Flow(), samples, MicroBatching(capacity=16, packing=packing), 0, axis(1))
    with pytest.raises(DataError, match=r"32 tokens, padding included"):
        training(Flow(), samples, MicroBatching(capacity=30, packing=True, pad_to_multiple_of=8), 0, axis(1))


@pytest.mark.parametrize("packing", [False, True])
def test_the_sequences_of_a_sample_stay_together(packing):
    """As preference pairs do: a sample's size is that of all its sequences."""
    pairs = [[[position + 1] * 3, [position + 1] * (5 + position)] for position in range(6)]
    made = training(Flow(), pairs, MicroBatching(capacity=24, packing=packing, **COSTS), 0, axis(1))
    actual = sorted(len(set(samples_of([micro_batch]))) * 2 == len(micro_batch.lengths) for micro_batch in made)
    assert actual == [True] * len(made)
    assert sorted({sample for micro_batch in made for sample in samples_of([micro_batch])}) == list(range(6))


@pytest.mark.parametrize("packing", [False, True])
def test_a_flow_without_a_weight_is_refused(packing):
    with pytest.raises(FlowError, match=r"max_tokens_per_micro_batch.*LossOutput.*get_loss_weight"):
        training(Flow(weight=None), batch(3), MicroBatching(capacity=48, packing=packing), 0, axis(1))
    assert len(training(Flow(weight=None), batch(3), MicroBatching(), 0, axis(1))) == 2


def test_random_choices_do_not_depend_on_the_other_replicas():
    """Each micro-batch is seeded with the run's seed plus the index of its first sample in the run."""
    how = MicroBatching(capacity=48, packing=True, **COSTS)
    for rank in range(2):
        for made in training(Flow(), batch(9), how, 100, axis(2, rank)):
            first = samples_of([made])[0]
            expected = torch.rand(2, generator=torch.Generator().manual_seed(100 + first))
            assert torch.equal(made.loss_inputs["noise"], expected)


def test_lengths_that_the_flow_knows_save_a_collation():
    class Known(Flow):
        def get_sample_lengths(self, sample: Any) -> list[int]:
            return [len(sample)]

    counting, known, how = Flow(), Known(), MicroBatching(capacity=48, packing=True)
    made = [training(flow, batch(6), how, 0, axis(1)) for flow in (counting, known)]
    assert [micro_batch.segments for micro_batch in made[0]] == [micro_batch.segments for micro_batch in made[1]]
    assert counting.collated == known.collated + 6


def log_normal_mix(count: int) -> list[int]:
    """Lengths in tokens with median 350 and sigma 1.0, clipped at 4,096."""
    drawn = numpy.exp(numpy.random.default_rng(0).normal(numpy.log(350), 1.0, count))
    return [int(length) for length in numpy.clip(numpy.round(drawn), 1, 4096)]


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("capacity", "multiple"), [(4096, 1), (8192, 1), (16384, 1), (32768, 1), (8192, 2)])
def test_the_flops_of_replicas_differ_by_less_than_3_percent(packing, replicas, capacity, multiple):
    """The mean of 16 steps of 256 samples; FLOPs that the micro-batches really take, padding of rows included."""
    config = load_run_config(SHAPE_OF_1B)
    shape = model_shape(config, config.arch.vocab_size or 0)
    flops = training_flops(shape)
    linear, square = flops.per_token, flops.per_square
    how = MicroBatching(capacity, False, packing, 1, multiple, token_cost=linear, square_cost=square)
    lengths, imbalances = log_normal_mix(16 * 256), []
    for start in range(0, len(lengths), 256):
        step = lengths[start : start + 256]
        totals = []
        for share in how.assign([[length] for length in step], replicas):
            bins = [[step[index] for index in indices] for indices in share]
            rows = (
                bins
                if packing
                else [[max(lengths_of_bin)] * len(lengths_of_bin) for lengths_of_bin in bins if lengths_of_bin]
            )
            totals.append(sum(flops.of(row, row**2) for row in itertools.chain(*rows)))
        imbalances.append(max(totals) / (sum(totals) / replicas) - 1)
    assert sum(imbalances) / len(imbalances) <= 0.03


def layout(tp: int = 1, cp: int = 1) -> ParallelState:
    one_rank = axis(1)
    return ParallelState(one_rank, axis(tp), one_rank, one_rank, axis(cp), one_rank, axis(cp), one_rank, one_rank, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "sizes", "capacity", "allow_oversized", "pad_to_multiple_of"),
    [
        ((), {}, None, True, 1),
        (("flow.packing=true",), {}, 256, True, 1),
        (("flow.packing=true",), {"cp": 2}, 256, True, 4),
        (("flow.packing=true",), {"tp": 2, "cp": 2}, 256, True, 4),  # the row is padded for TP, not each sequence
        (("budget",), {"tp": 2}, 384, False, 2),
        (("budget", "flow.packing=true"), {"tp": 2}, 384, False, 1),
    ],
)
def test_how_a_batch_is_split_follows_from_the_configuration(
    overrides, sizes, capacity, allow_oversized, pad_to_multiple_of
):
    texts = {
        "flow.packing=true": "megatron_wrap.flow.packing=true",
        "budget": "megatron_lm.train.common.max_tokens_per_micro_batch=384",
    }
    sequence_parallel = f"megatron_lm.model.parallel.tensor_model_parallel_size={sizes.get('tp', 1)}"
    config = load_run_config(MOCK, [sequence_parallel, *(texts[name] for name in overrides)])
    how = micro_batching_of(config, layout(**sizes), model_shape(config, 500), num_microbatches_multiple=2)
    assert (how.capacity, how.allow_oversized) == (capacity, allow_oversized)
    assert (how.packing, how.pad_to_multiple_of) == ("flow.packing=true" in overrides, pad_to_multiple_of)
    assert how.num_microbatches_multiple == 2
    assert how.token_cost > how.square_cost > 0
    assert how.by_samples() == MicroBatching(num_microbatches_multiple=2)


class WithStepSamples(Flow):
    step_values_from = "inputs"

    def get_step_samples(self, samples: Any) -> Any:
        return [[*sample, 0] for sample in samples]


@pytest.mark.parametrize("how", [MicroBatching(), *splits()])
def test_samples_of_statistics_have_micro_batches_of_their_own(how):
    samples = batch(7)
    indices: list[int] = []
    for rank in range(2):
        made = split(WithStepSamples(), samples, how, 0, axis(2, rank))
        for extra_tokens, micro_batches in enumerate((made.training, made.statistics)):
            counted = [micro_batch for micro_batch in micro_batches if micro_batch.counted]
            of_kind = [index for micro_batch in counted for index in micro_batch.sample_indices]
            assert samples_of(counted) == of_kind
            tokens = sum(int(micro_batch.lengths.sum()) for micro_batch in counted)
            assert tokens == sum(len(samples[index]) + extra_tokens for index in of_kind)
            indices += of_kind
    assert sorted(indices) == sorted([*range(7), *range(7)])
    assert split(Flow(), samples, how, 0, axis(1)).statistics == ()


def test_statistics_need_one_sample_for_each():
    class Fewer(WithStepSamples):
        def get_step_samples(self, samples: Any) -> Any:
            return samples[1:]

    with pytest.raises(FlowError, match="2 samples for a batch of 3"):
        training(Fewer(), batch(3), MicroBatching(), 0, axis(1))
