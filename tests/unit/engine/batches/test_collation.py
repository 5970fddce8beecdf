"""Collating, counting, padding and splitting of a micro-batch. No process group."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from megatron_wrap.engine.batches.collation import collate, try_flow
from megatron_wrap.engine.batches.micro_batch import Localization, shard
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow import FlowContext, FlowOptions, LossOutput, MegatronWrapGPTModelFlow
from megatron_wrap.parallel.state import Axis, ParallelState


class Flow(MegatronWrapGPTModelFlow):
    """Samples are lists of ids; `change` modifies the collated fields."""

    def __init__(self, change: Any = None, weight: Any = None) -> None:
        super().__init__(
            FlowOptions("test", {}), FlowContext(2, 8, 16, 1, lambda part: part, lambda value: value, None)
        )
        self.change, self.weight, self.sizes = change, weight, []

    def collate_data_micro_batch(self, iterator: Any) -> Any:
        self.sizes.append(self.micro_batch_size)
        rows = [torch.tensor(next(iterator)) for _ in range(self.micro_batch_size)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
        inputs = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids), "attention_mask": mask}
        loss = {"loss_mask": mask, "noise": torch.rand(3), "row": torch.arange(len(rows))}
        return (inputs, loss) if self.change is None else self.change(inputs, loss)

    def get_pad_values(self) -> dict[str, float]:
        return {"input_ids": 15}

    def get_loss_weight(self, loss_inputs: Any) -> Any:
        return super().get_loss_weight(loss_inputs) if self.weight is None else self.weight

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        raise AssertionError


SAMPLES = [[1, 2, 3], [4, 5, 6, 7, 8]]


def test_a_micro_batch_has_weights_lengths_and_width():
    made = collate(Flow(), SAMPLES, seed=0)
    assert (made.weights, made.lengths.tolist(), made.width, made.num_samples) == ({"": 8.0}, [3, 5], 5, 2)
    assert made.model_inputs["attention_mask"] is None  # attention is causal and padding is on the right


def test_the_last_micro_batch_may_be_smaller_and_the_flow_s_size_is_restored():
    flow = Flow()
    collate(flow, SAMPLES[:1], seed=0)
    collate(flow, SAMPLES, seed=0)
    assert (flow.sizes, flow.micro_batch_size) == ([1, 2], 2)

    def broken(inputs: Any, loss: Any) -> Any:
        raise KeyError("in the flow")

    flow.change = broken
    with pytest.raises(KeyError):
        collate(flow, SAMPLES[:1], seed=0)
    assert flow.micro_batch_size == 2


def test_random_choices_depend_only_on_the_seed_and_do_not_change_the_training_s_generators():
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    first, same, other = (collate(Flow(), SAMPLES, seed=seed).loss_inputs["noise"] for seed in (3, 3, 4))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == generators[1:]


def test_terms_are_counted_by_name():
    assert collate(Flow(weight={"a": 2, "b": torch.tensor(0.5)}), SAMPLES, seed=0).weights == {"a": 2.0, "b": 0.5}


def drop(field: str) -> Any:
    return lambda inputs, loss: ({name: value for name, value in inputs.items() if name != field}, loss)


def put(**fields: Any) -> Any:
    return lambda inputs, loss: ({**inputs, **fields}, loss)


LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs, loss: inputs, r"dict.*return \(model_forward_inputs, loss_inputs\)"),
        (put(input_ids=[1, 2]), "'input_ids'.*list.*CPU tensor"),
        (drop("position_ids"), "position_ids.*input_ids"),
        (put(position_ids=torch.zeros(2, 4)), "lengths differ.*'position_ids': 4"),
        (put(position_ids=torch.zeros(2)), r"'position_ids'.*dimension 1.*\(2,\)"),
        (put(attention_mask=LEFT_PADDED), "attention_mask.*padding.*on the right"),
        (put(attention_mask=torch.ones(2, 5, 5)), r"attention_mask.*\(2, 5, 5\).*\[B, S\]"),
    ],
)
def test_a_broken_contract_is_refused(change, message):
    with pytest.raises(FlowError, match=message):
        collate(Flow(change), SAMPLES, seed=0)


@pytest.mark.parametrize(
    ("flow", "samples", "error", "message"),
    [
        (Flow(), [[1] * 9, [2]], FlowError, r"9 tokens.*megatron_lm\.train\.common\.seq_length 8"),
        *((Flow(), [ids, [3]], DataError, r"^a: Flow: .*vocabulary.* 0 to 15") for ids in ([16], [1, 40], [-1])),
        (Flow(), [[3], [1, 40]], DataError, r"^b: Flow: input_ids has the token id 40"),
        *(
            (Flow(weight=weight), SAMPLES, FlowError, r"get_loss_weight.*finite")
            for weight in (-1.0, float("nan"), float("inf"), {"a": -2.0}, "many", torch.ones(2))
        ),
    ],
)
def test_lengths_ids_and_weights_are_compared_with_what_a_run_can_use(flow, samples, error, message):
    with pytest.raises(error, match=message):
        collate(flow, samples, seed=0, name_of=["a", "b"].__getitem__)


def test_a_flow_must_take_exactly_micro_batch_size_samples():
    class Greedy(Flow):
        def collate_data_micro_batch(self, iterator: Any) -> Any:
            made = super().collate_data_micro_batch(iterator)
            next(iterator)
            return made

    class Lazy(Flow):
        def collate_data_micro_batch(self, iterator: Any) -> Any:
            return super().collate_data_micro_batch(iter([next(iterator)] * self.micro_batch_size))

    with pytest.raises(FlowError, match=r"more than self\.micro_batch_size = 2 .*next\(iterator\)"):
        collate(Greedy(), SAMPLES, seed=0)
    with pytest.raises(FlowError, match=r"leaves 1 of self\.micro_batch_size = 2 .*next\(iterator\)"):
        collate(Lazy(), SAMPLES, seed=0)


def named(samples: list[Any]) -> list[tuple[str, Any]]:
    return [(f"row {index}", sample) for index, sample in enumerate(samples)]


def test_try_flow_compares_the_terms_of_two_micro_batches():
    class ByContent(Flow):
        def get_loss_weight(self, loss_inputs: Any) -> Any:
            return {"a": 1.0, "b": 1.0} if loss_inputs["loss_mask"].shape[1] == 5 else {"a": 1.0}

        def get_loss_coefficients(self) -> dict[str, float]:
            return {"a": 0.5, "typo": 2.0}

    try_flow(Flow(), [], seed=0)
    flow = Flow()
    try_flow(flow, named([*SAMPLES, [9]]), seed=0)
    assert flow.sizes == [2, 1]
    with pytest.raises(FlowError, match=r"\['a', 'b'\].*\['a'\]"):
        try_flow(ByContent(), named([*SAMPLES, [9], [8]]), seed=0)
    with pytest.raises(FlowError, match=r"get_loss_coefficients.*'typo'.*get_loss_weight.*'a', 'b"):
        try_flow(ByContent(), named(SAMPLES), seed=0)
    with pytest.raises(DataError, match=r"^row 2: Flow: input_ids has the token id 16"):
        try_flow(Flow(), named([[1], [2], [16]]), seed=0)


def with_field(name: str, values: list[list[int]], mask: list[list[float]] | None = None) -> Any:
    """A change of the collated fields that adds one, and replaces the loss mask or, if it is [], removes it."""

    def change(inputs: Any, loss: Any) -> Any:
        fields = {**loss, name: torch.tensor(values), "loss_mask": torch.tensor([[1.0, 1.0]] if mask is None else mask)}
        if mask == []:
            del fields["loss_mask"]
        return inputs, fields

    return change


@pytest.mark.parametrize(
    ("values", "mask", "wrong"),
    [
        ([[3, 16]], None, "16"),
        ([[3, -1]], None, "-1"),
        ([[3, -100]], [[1.0, 1.0]], "-100"),
        ([[3, 16]], [[1.0, 0.0]], "16"),
        ([[3, -100]], [[1.0, 0.0]], None),
        ([[3, -1]], [[1.0, 0.0]], None),
        ([[3, -100]], [], None),
        ([[3, -1]], [], "-1"),
        ([[0, 15]], None, None),
    ],
)
def test_labels_are_compared_with_the_vocabulary(values, mask, wrong):
    flow = Flow(with_field("labels", values, mask))
    if wrong is None:
        collate(flow, [[1, 2]], seed=0)
    else:
        with pytest.raises(DataError, match=f"Flow: labels has the token id {wrong}, .* 0 to 15"):
            collate(flow, [[1, 2]], seed=0)


def test_further_fields_of_ids_are_those_that_the_flow_lists():
    class Listed(Flow):
        token_id_fields = (*Flow.token_id_fields, "targets")

    change = with_field("targets", [[3, 16]])
    collate(Flow(change), [[1, 2]], seed=0)
    with pytest.raises(DataError, match="Listed: targets has the token id 16"):
        collate(Listed(change), [[1, 2]], seed=0)


def test_labels_that_are_no_ids_are_not_compared():
    def change(inputs: Any, loss: Any) -> Any:
        return inputs, {**loss, "labels": torch.tensor([[0.5, 700.0]])}

    collate(Flow(change), [[1, 2]], seed=0)


def test_ids_that_the_reference_model_lacks_are_refused():
    flow = Flow()
    flow.context = dataclasses.replace(flow.context, common_vocab_size=12)
    collate(flow, [[11]], seed=0)
    with pytest.raises(DataError, match=r"token id 12, .* 0 to 11"):
        collate(flow, [[12]], seed=0)


def test_without_a_loss_mask_a_micro_batch_has_the_default_weight_1():
    micro_batch = collate(Flow(lambda inputs, loss: (inputs, {})), SAMPLES, seed=0)
    assert micro_batch.weights == {"": 1.0}
    assert not micro_batch.has_explicit_weight


def parallel(cp: int = 1, cp_rank: int = 0, tp: int = 1) -> ParallelState:
    one_rank = Axis(1, 0, None)  # type: ignore[arg-type]
    tensor, context = Axis(tp, 0, None), Axis(cp, cp_rank, None)  # type: ignore[arg-type]
    return ParallelState(one_rank, tensor, one_rank, one_rank, context, one_rank, context, one_rank, one_rank, None)


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel", "expected"),
    [(1, 1, False, 5), (1, 2, False, 5), (1, 2, True, 6), (2, 1, False, 8), (2, 4, True, 8), (2, 3, True, 12)],
)
def test_sequences_are_padded_to_a_multiple_of_the_layout_s_divisor(cp, tp, sequence_parallel, expected):
    localization = Localization(parallel(cp=cp, tp=tp), torch.device("cpu"), sequence_parallel, has_experts=False)
    [local] = localization.shard([collate(Flow(), SAMPLES, seed=0)])
    assert local.padded_width == expected


def test_context_parallel_shards_cover_the_padded_fields_and_other_fields_are_copied():
    made = collate(Flow(), SAMPLES, seed=0)
    parts = [shard(made, 8, parallel(cp=2, cp_rank=rank).cp) for rank in (0, 1)]
    ids = torch.full((2, 8), 15)
    ids[0, :3], ids[0, 3:5], ids[1, :5] = torch.tensor([1, 2, 3]), 0, torch.tensor([4, 5, 6, 7, 8])
    assert torch.equal(parts[0].model_inputs["input_ids"], ids[:, [0, 1, 6, 7]])
    assert torch.equal(parts[1].model_inputs["input_ids"], ids[:, [2, 3, 4, 5]])
    assert sum(float(part.loss_inputs["loss_mask"].sum()) for part in parts) == 8  # padding is not counted
    for part in parts:
        assert part.loss_inputs["row"].tolist() == [0, 1]
        assert part.weights == made.weights
        assert part.model_inputs["attention_mask"] is None
