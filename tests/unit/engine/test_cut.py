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
from megatron_wrap.engine.build import model_shape
from megatron_wrap.engine.cut import BatchCut, batch_cut, prepare_batch
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow import FlowContext, FlowOptions, LossOutput, MegatronWrapGPTModelFlow
from megatron_wrap.metrics.throughput import training_flops
from megatron_wrap.parallel.state import Axis, ParallelState

SHAPE_OF_1B = Path(__file__).parents[3] / "scripts/benchmark/llama-1b.yaml"
MOCK = Path(__file__).parents[3] / "configs/tiny-llama-mock.yaml"
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
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(one)) for one in sequences], batch_first=True)
        self.collated += 1
        inputs = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids), "attention_mask": mask}
        return inputs, {"noise": torch.rand(2)}

    def get_loss_weight(self, loss_inputs: Any) -> Any:
        return self.weight

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        raise AssertionError


def axis(size: int, rank: int = 0) -> Axis:
    return Axis(size, rank, None)  # type: ignore[arg-type]


def batch(count: int, longest: int = 40, seed: int = 3) -> list[list[int]]:
    """Samples of unequal lengths; the first token of each is its index plus 1, the others are 0."""
    generator = random.Random(seed)
    return [[place + 1] + [0] * generator.randint(0, longest - 1) for place in range(count)]


def samples_of(micro_batches: list[Any]) -> list[int]:
    """The samples of counted micro-batches, by their first tokens."""
    ids = [one.model_inputs["input_ids"] for one in micro_batches if one.counted]
    return [int(token) - 1 for tokens in ids for token in tokens.flatten() if token > 0]


def cuts(**settings: Any) -> list[BatchCut]:
    return [BatchCut(capacity=48, packing=packing, **COSTS, **settings) for packing in (False, True)]


@pytest.mark.parametrize("cut", [BatchCut(), *cuts(), *cuts(multiple=4), *cuts(rounds=2), *cuts(multiple=8, rounds=3)])
@pytest.mark.parametrize("count", [1, 5, 16, 31])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_every_sample_is_in_one_micro_batch_and_all_replicas_have_as_many(cut, count, replicas):
    given = batch(count)
    by_replica = [prepare_batch(Flow(), given, cut, 0, axis(replicas, rank)) for rank in range(replicas)]
    assert sorted(sample for one in by_replica for sample in samples_of(one)) == list(range(count))
    [number] = {len(one) for one in by_replica}
    if cut.capacity is not None:
        assert number % cut.rounds == 0
        for micro_batch in (one for replica in by_replica for one in replica if one.counted):
            assert micro_batch.num_rows * -(-micro_batch.width // cut.multiple) * cut.multiple <= cut.capacity
    counted = sum(int(one.lengths.sum()) for replica in by_replica for one in replica if one.counted)
    assert counted == sum(map(len, given))


@pytest.mark.parametrize("packing", [False, True])
def test_no_more_micro_batches_than_needed(packing):
    cut = BatchCut(capacity=48, packing=packing, **COSTS)
    shares = cut.places([[length] for length in (24, 24, 24, 24, 12, 12, 12, 12)], replicas=1)
    assert len(shares[0]) == 3


def test_a_larger_sample_is_a_micro_batch_of_its_own_or_is_refused():
    given = [[7] * 30, [1, 2], [3, 4], [5, 6]]
    made = prepare_batch(Flow(), given, BatchCut(capacity=16, grows=True, packing=True), 0, axis(1))
    assert sorted(one.segments for one in made) == [(2, 2, 2), (30,)]
    for packing in (False, True):
        with pytest.raises(DataError, match=r"30 tokens.*max_tokens_per_micro_batch 16.*at least 30"):
            prepare_batch(Flow(), given, BatchCut(capacity=16, packing=packing), 0, axis(1))
    with pytest.raises(DataError, match=r"32 tokens, padding included"):
        prepare_batch(Flow(), given, BatchCut(capacity=30, packing=True, multiple=8), 0, axis(1))


@pytest.mark.parametrize("packing", [False, True])
def test_the_sequences_of_a_sample_stay_together(packing):
    """As preference pairs do: a sample's size is that of all its sequences."""
    pairs = [[[place + 1] * 3, [place + 1] * (5 + place)] for place in range(6)]
    made = prepare_batch(Flow(), pairs, BatchCut(capacity=24, packing=packing, **COSTS), 0, axis(1))
    found = sorted(len(set(samples_of([one]))) * 2 == len(one.lengths) for one in made)
    assert found == [True] * len(made)
    assert sorted({sample for one in made for sample in samples_of([one])}) == list(range(6))


@pytest.mark.parametrize("packing", [False, True])
def test_a_flow_without_a_weight_is_refused(packing):
    with pytest.raises(FlowError, match=r"max_tokens_per_micro_batch.*LossOutput.*get_loss_weight"):
        prepare_batch(Flow(weight=None), batch(3), BatchCut(capacity=48, packing=packing), 0, axis(1))
    assert len(prepare_batch(Flow(weight=None), batch(3), BatchCut(), 0, axis(1))) == 2


def test_random_choices_do_not_depend_on_the_other_replicas():
    """Each micro-batch is seeded with the run's seed plus the index of its first sample in the run."""
    cut = BatchCut(capacity=48, packing=True, **COSTS)
    for rank in range(2):
        for made in prepare_batch(Flow(), batch(9), cut, 100, axis(2, rank)):
            first = samples_of([made])[0]
            expected = torch.rand(2, generator=torch.Generator().manual_seed(100 + first))
            assert torch.equal(made.loss_inputs["noise"], expected)


def test_lengths_that_the_flow_knows_save_a_collation():
    class Known(Flow):
        def get_sample_lengths(self, sample: Any) -> list[int]:
            return [len(sample)]

    counting, known, cut = Flow(), Known(), BatchCut(capacity=48, packing=True)
    made = [prepare_batch(flow, batch(6), cut, 0, axis(1)) for flow in (counting, known)]
    assert [one.segments for one in made[0]] == [one.segments for one in made[1]]
    assert counting.collated == known.collated + 6


def log_normal_mix(count: int) -> list[int]:
    """Lengths in tokens with median 350 and sigma 1.0, cut at 4,096."""
    drawn = numpy.exp(numpy.random.default_rng(0).normal(numpy.log(350), 1.0, count))
    return [int(length) for length in numpy.clip(numpy.round(drawn), 1, 4096)]


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("capacity", "rounds"), [(4096, 1), (8192, 1), (16384, 1), (32768, 1), (8192, 2)])
def test_the_flops_of_replicas_differ_by_less_than_3_percent(packing, replicas, capacity, rounds):
    """The mean of 16 steps of 256 samples; FLOPs that the micro-batches really take, padding of rows included."""
    config = load_run_config(SHAPE_OF_1B)
    shape = model_shape(config, config.arch.vocab_size or 0)
    linear, square = training_flops(shape, 1.0, 0.0), training_flops(shape, 0.0, 1.0)
    cut = BatchCut(capacity=capacity, packing=packing, rounds=rounds, token_cost=linear, square_cost=square)
    lengths, imbalances = log_normal_mix(16 * 256), []
    for start in range(0, len(lengths), 256):
        step = lengths[start : start + 256]
        totals = []
        for share in cut.places([[length] for length in step], replicas):
            packs = [[step[item] for item in pack] for pack in share]
            rows = packs if packing else [[max(pack)] * len(pack) for pack in packs if pack]
            totals.append(sum(training_flops(shape, row, row**2) for row in itertools.chain(*rows)))
        imbalances.append(max(totals) / (sum(totals) / replicas) - 1)
    assert sum(imbalances) / len(imbalances) <= 0.03


def layout(tp: int = 1, cp: int = 1) -> ParallelState:
    one = axis(1)
    return ParallelState(one, axis(tp), one, one, axis(cp), one, axis(cp), one, one, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "sizes", "expected"),
    [
        ((), {}, {"capacity": None, "multiple": 1}),
        (("flow.packing=true",), {}, {"capacity": 256, "grows": True, "packing": True, "multiple": 1}),
        (("flow.packing=true",), {"cp": 2}, {"capacity": 256, "multiple": 4}),
        (("flow.packing=true",), {"tp": 2, "cp": 2}, {"multiple": 4}),  # the row is padded for TP, not each sequence
        (("budget",), {"tp": 2}, {"capacity": 384, "grows": False, "packing": False, "multiple": 2}),
        (("budget", "flow.packing=true"), {"tp": 2}, {"capacity": 384, "grows": False, "packing": True, "multiple": 1}),
    ],
)  # fmt: skip
def test_the_cut_follows_from_the_configuration(overrides, sizes, expected):
    texts = {
        "flow.packing=true": "megatron_wrap.flow.packing=true",
        "budget": "megatron_lm.train.common.max_tokens_per_micro_batch=384",
    }
    sequence_parallel = f"megatron_lm.model.parallel.tensor_model_parallel_size={sizes.get('tp', 1)}"
    config = load_run_config(MOCK, [sequence_parallel, *(texts[name] for name in overrides)])
    cut = batch_cut(config, layout(**sizes), model_shape(config, 500), rounds=2)
    assert {name: getattr(cut, name) for name in expected} == expected
    assert cut.rounds == 2
    assert cut.token_cost > cut.square_cost > 0
    assert cut.fixed() == BatchCut(rounds=2)


class WithStepSamples(Flow):
    step_values_from = "inputs"

    def get_step_samples(self, samples: Any) -> Any:
        return [[*sample, 0] for sample in samples]


@pytest.mark.parametrize("cut", [BatchCut(), *cuts()])
def test_samples_of_statistics_have_micro_batches_of_their_own_and_places(cut):
    given = batch(7)
    found: list[int] = []
    for rank in range(2):
        made = prepare_batch(WithStepSamples(), given, cut, 0, axis(2, rank))
        for kind in (False, True):
            some = [one for one in made if one.for_step_values == kind and one.counted]
            assert samples_of(some) == [place for one in some for place in one.places]
            tokens = sum(int(one.lengths.sum()) for one in some)
            places = [place for one in some for place in one.places]
            assert tokens == sum(len(given[place]) + kind for place in places)
            found += places
    assert sorted(found) == sorted([*range(7), *range(7)])
    assert not any(one.for_step_values for one in prepare_batch(Flow(), given, cut, 0, axis(1)))


def test_statistics_need_one_sample_for_each():
    class Fewer(WithStepSamples):
        def get_step_samples(self, samples: Any) -> Any:
            return samples[1:]

    with pytest.raises(FlowError, match="2 samples for a batch of 3"):
        prepare_batch(Fewer(), batch(3), BatchCut(), 0, axis(1))
