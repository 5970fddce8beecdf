"""Common to all flows: look-up, options, helpers, errors. No process group."""

from __future__ import annotations

import pytest
import torch

from megatron_wrap.errors import ConfigError, FlowError
from megatron_wrap.flow import (
    FlowContext,
    FlowOptions,
    MegatronWrapFlowEntry,
    MegatronWrapGPTModelFlow,
    MegatronWrapGPTModelSFTFlow,
    MegatronWrapMinimalMockFlow,
    MegatronWrapTrainingFlowBase,
)
from megatron_wrap.flow.contract.base import SEQUENCE_LENGTHS
from megatron_wrap.flow.contract.class_checks import packing_refusal


def context(**changes: object) -> FlowContext:
    settings = {
        "micro_batch_size": 2,
        "seq_length": 16,
        "vocab_size": 50,
        "cp_size": 1,
        "sum_on_cp_group": lambda part: part,
        "average_across_dp_ranks": lambda value: value,
        "tokenizer": None,
    }
    return FlowContext(**{**settings, **changes})  # type: ignore[arg-type]


def mock(vary_length: bool = True, **changes: object) -> MegatronWrapMinimalMockFlow:
    options = FlowOptions("minimal_mock", {"vary_length": vary_length})
    return MegatronWrapMinimalMockFlow(options, context(**changes))


def test_flows_are_found_by_key_by_path_and_by_decorator():
    actual = MegatronWrapFlowEntry.get_flow_class
    assert actual("gpt_sft") is MegatronWrapGPTModelSFTFlow
    assert actual("minimal_mock") is MegatronWrapMinimalMockFlow
    assert actual("megatron_wrap.flow.sft:MegatronWrapGPTModelSFTFlow") is MegatronWrapGPTModelSFTFlow

    @MegatronWrapFlowEntry.register("of_this_test")
    class OfThisTest(MegatronWrapMinimalMockFlow):
        pass

    assert actual("of_this_test") is OfThisTest


def test_the_error_of_a_wrong_key_suggests_the_closest_one():
    with pytest.raises(ConfigError, match="gpt_sft"):
        MegatronWrapFlowEntry.get_flow_class("gpt_stf")
    with pytest.raises(FlowError, match="MegatronWrapTrainingFlowBase"):
        MegatronWrapFlowEntry.get_flow_class("megatron_wrap.errors:FlowError")


class Unfinished(MegatronWrapGPTModelFlow):
    pass


class Swapped(MegatronWrapMinimalMockFlow):
    def calculate_loss(self, loss_inputs):
        raise AssertionError


class NoContext(MegatronWrapMinimalMockFlow):
    def __init__(self, flow_config):
        raise AssertionError


LOSS = r"calculate_loss\(self, loss_inputs, model_forward_output\)"


@pytest.mark.parametrize(
    ("flow", "signatures"),
    [
        (Unfinished, rf"Unfinished .*{LOSS}.*collate_data_micro_batch\(self, iterator\).*docs/flow-contract\.md"),
        (Swapped, f"def {LOSS}"),
        (NoContext, r"def __init__\(self, flow_config, context\)"),
    ],
)
def test_the_error_of_an_incomplete_flow_gives_the_missing_signatures(flow, signatures):
    MegatronWrapFlowEntry.register(f"test_{flow.__name__}")(flow)
    with pytest.raises(FlowError, match=signatures):
        MegatronWrapFlowEntry.get_flow_class(f"test_{flow.__name__}")


def test_options_are_attributes_and_the_error_names_a_missing_one():
    options = FlowOptions("mine", {"beta": 0.1})
    assert (options.flow_key, options.beta) == ("mine", 0.1)
    with pytest.raises(FlowError, match=r"'gamma'.*megatron_wrap\.flow.*beta, flow_key"):
        _ = options.gamma


def test_token_mean_ignores_values_where_the_mask_is_0():
    per_token = torch.tensor([[1.0, float("nan"), 3.0], [float("inf"), 5.0, 6.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    share = mock().token_mean(per_token, mask)
    share.backward()
    assert share.item() == 1.0 + 1.5 + 5.0
    assert torch.equal(per_token.grad, mask)


def test_sequence_mean_divides_by_the_context_parallel_size():
    per_sequence = torch.tensor([1.0, 2.0, 6.0])
    assert sum(float(mock(cp_size=3).sequence_mean(per_sequence)) for _ in range(3)) == 9.0


@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_sum_per_sequence_is_the_same_for_packed_and_unpacked_rows(cp_size):
    """One rank of `cp_size`; the row's padding belongs to no sequence."""
    flow = mock(cp_size=cp_size, sum_on_cp_group=lambda part: cp_size * part)  # as if all ranks had the same part
    lengths, width = [3, 1, 4], 6
    unpacked = torch.randn(3, width) * (torch.arange(width) < torch.tensor(lengths)[:, None])
    unpacked.requires_grad_()
    packed = torch.cat([row[:length] for row, length in zip(unpacked, lengths, strict=True)])
    packed = torch.cat([packed, torch.full((2,), 7.0)])[None].detach().requires_grad_()
    factors = torch.tensor([1.0, 10.0, 100.0])
    actual = flow.sum_per_sequence(packed, {SEQUENCE_LENGTHS: torch.tensor([*lengths, 2])})
    torch.testing.assert_close(actual, flow.sum_per_sequence(unpacked, {}))
    (actual * factors).sum().backward()
    expected = factors.repeat_interleave(torch.tensor(lengths))
    torch.testing.assert_close(packed.grad[0], torch.cat([expected, torch.zeros(2)]) * cp_size)


def test_what_a_flow_or_its_rows_do_not_have_is_refused():
    """Packed rows have no boundaries, and each sequence is split over context-parallel ranks on its own."""
    packed = MegatronWrapMinimalMockFlow(FlowOptions("minimal_mock", {"vary_length": True}, True), context())
    assert mock().gather_on_cp_group(torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(FlowError, match=r"gather_on_cp_group.*packing: true.*sum_per_sequence.*packing: false"):
        packed.gather_on_cp_group(torch.ones(1, 2))
    with pytest.raises(FlowError, match=r"MegatronWrapMinimalMockFlow .*calculate_outputs"):
        mock().calculate_outputs({}, torch.zeros(1))


def test_packing_is_declared_by_the_class_that_defines_the_loss():
    class OtherSamples(MegatronWrapGPTModelSFTFlow):
        def get_loss_weight(self, loss_inputs):
            return 1.0

    class OtherLoss(OtherSamples):
        def calculate_loss(self, loss_inputs, model_forward_output):
            raise AssertionError

    class Declared(OtherLoss):
        supports_packing = True

    class Below(Declared):
        def calculate_outputs(self, loss_inputs, model_forward_output):
            raise AssertionError

    class Off(MegatronWrapGPTModelSFTFlow):
        supports_packing = False

    for flow in (MegatronWrapGPTModelSFTFlow, MegatronWrapMinimalMockFlow, OtherSamples, Declared):
        assert packing_refusal(flow) == ""
    assert "OtherLoss defines calculate_loss" in packing_refusal(OtherLoss)
    assert "Below defines calculate_outputs" in packing_refusal(Below)
    assert "Off does not declare supports_packing" in packing_refusal(Off)
    assert "supports_packing" in packing_refusal(MegatronWrapGPTModelFlow)


def test_inheritance_and_representation_are_as_documented():
    assert issubclass(MegatronWrapMinimalMockFlow, MegatronWrapGPTModelFlow)
    assert issubclass(MegatronWrapGPTModelSFTFlow, MegatronWrapGPTModelFlow)
    assert issubclass(MegatronWrapGPTModelFlow, MegatronWrapTrainingFlowBase)
    assert str(mock()) == "MegatronWrapMinimalMockFlow(flow_key=minimal_mock, seq_length=16, micro_batch_size=2)"


def test_a_mock_sample_is_a_function_of_its_index():
    flow = mock()
    inputs, loss_inputs = flow.collate_data_micro_batch(iter([{"index": 3}, {"index": 4}]))
    torch.manual_seed(99)
    again, _ = mock().collate_data_micro_batch(iter([{"index": 4}, {"index": 3}]))
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    assert lengths == again["attention_mask"].sum(dim=1).tolist()[::-1]
    assert inputs["input_ids"][0, : lengths[0]].tolist() == again["input_ids"][1, : lengths[0]].tolist()
    assert all(4 <= length <= 16 for length in lengths)
    assert int(inputs["input_ids"].max()) < 50
    assert torch.equal(loss_inputs["loss_mask"], inputs["attention_mask"])
    assert flow.get_loss_weight(loss_inputs) == sum(lengths)


def test_mock_samples_of_one_length_and_placeholders():
    flow = mock(vary_length=False)
    inputs, _ = flow.collate_data_micro_batch(iter([None, None, None]))  # takes micro_batch_size of them
    assert inputs["input_ids"].shape == (2, 16)
    assert inputs["attention_mask"].all()


def test_the_micro_batch_size_is_that_of_the_collation():
    flow = mock()
    with flow.context.collation.of(1):
        assert flow.micro_batch_size == 1
    assert flow.micro_batch_size == 2
    with pytest.raises(RuntimeError), flow.context.collation.of(1):
        raise RuntimeError
