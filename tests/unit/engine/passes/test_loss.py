"""Loss normalization on one rank's micro-batches: the loss passed to the schedule, and errors. No process group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.engine.passes.loss import OBJECTIVE, NormalizedLoss, take_objective
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import FlowContext, FlowOptions, LossOutput, MegatronWrapTrainingFlowBase, Total
from megatron_wrap.metrics.metric import MetricSums, read_reduced


class Flow(MegatronWrapTrainingFlowBase):
    """A flow whose calculate_loss is `answer(output)`."""

    def __init__(self, answer: Any, coefficients: dict[str, float] | None = None) -> None:
        context = FlowContext(2, 8, 16, 1, lambda part: part, lambda value: value, None)
        super().__init__(FlowOptions("test", {}), context)
        self.answer, self.coefficients = answer, coefficients or {}

    def collate_data_micro_batch(self, iterator: Any) -> Any:
        raise AssertionError("not collated here")

    def get_loss_coefficients(self) -> dict[str, float]:
        return self.coefficients

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> Any:
        return self.answer(model_forward_output)


def normalized(
    flow: Flow, step_weights: dict[str, float], num_microbatches: int = 1, dp: int = 1, cp: int = 1
) -> NormalizedLoss:
    return NormalizedLoss(
        flow, flow.calculate_loss, cp, dp, step_weights, num_microbatches, MetricSums(torch.device("cpu"))
    )


def micro_batch(counted: bool = True, **weights: float) -> MicroBatch:
    named = {"" if term == "loss" else term: weight for term, weight in weights.items()}
    return MicroBatch({}, {}, named, 2, torch.tensor([4, 4]), 4, counted=counted)


def reduced(sums: MetricSums) -> dict[str, float | None]:
    return read_reduced(sums.kinds, [float(number) for number in sums.summands(sums.kinds)])


OUTPUT = [1.0, 2.0, 3.0]


def output() -> Tensor:
    return torch.tensor(OUTPUT, requires_grad=True)


@pytest.mark.parametrize(("num_microbatches", "dp", "cp"), [(1, 1, 1), (4, 2, 1), (3, 2, 2)])
def test_the_divisions_of_the_schedule_leave_loss_sum_over_weight(num_microbatches, dp, cp):
    """The schedule divides by micro-batches and by dp * cp; the result is loss_sum / W."""
    taken = normalized(Flow(lambda out: LossOutput(out.sum())), {"": 20.0}, num_microbatches, dp, cp)
    loss = taken(micro_batch(loss=5.0), output())
    assert loss.item() / num_microbatches / (dp * cp) == pytest.approx(6.0 / 20.0)
    assert float(reduced(taken.sums)[OBJECTIVE]) == pytest.approx(6.0 * cp / 5.0)  # the sum of cp equal shares


def test_terms_have_their_own_weights_and_coefficients():
    flow = Flow(lambda out: LossOutput({"a": out.sum(), "b": (out**2).sum()}), {"b": 0.5})
    taken = normalized(flow, {"a": 4.0, "b": 7.0})
    loss = taken(micro_batch(a=4.0, b=7.0), output())
    assert loss.item() == pytest.approx(6.0 / 4 + 0.5 * 14.0 / 7)
    values = reduced(taken.sums)
    assert take_objective(values, flow.get_loss_coefficients()) == pytest.approx(loss.item())
    assert values == {}


def test_a_term_without_weight_in_the_step_is_left_out_of_loss_and_objective():
    flow = Flow(lambda out: LossOutput({"a": out.sum(), "b": out.sum() * math.inf}))
    taken = normalized(flow, {"a": 3.0, "b": 0.0})
    here = output()
    loss = taken(micro_batch(a=3.0, b=0.0), here)
    assert torch.autograd.grad(loss, here)[0].tolist() == pytest.approx([1 / 3] * 3)
    assert take_objective(reduced(taken.sums), {}) == pytest.approx(2.0)


def test_the_two_value_return_is_a_mean_over_micro_batches_and_replicas():
    taken = normalized(Flow(lambda out: (out.mean(), {"seen": 1.0})), {"": 123.0}, num_microbatches=4, dp=2, cp=2)
    loss = taken(micro_batch(loss=9.0), output())
    # complete and equal on both context-parallel ranks, over which the schedule averages
    assert loss.item() == pytest.approx(2.0)
    assert float(reduced(taken.sums)[OBJECTIVE]) == pytest.approx(2.0)


def test_a_filler_adds_nothing_but_takes_part_in_the_backward_pass():
    def fail(out: Tensor) -> Any:
        raise AssertionError("a filler must not be passed to the flow")

    taken = normalized(Flow(fail), {"": 3.0})
    here = output()
    loss = taken(micro_batch(counted=False, loss=3.0), here)
    assert torch.autograd.grad(loss, here)[0].tolist() == [0.0, 0.0, 0.0]
    assert taken.sums.kinds == {}


def test_a_zero_loss_may_have_no_graph():
    taken = normalized(Flow(lambda out: LossOutput(torch.zeros(()))), {"": 3.0})
    here = output()
    loss = taken(micro_batch(loss=0.0), here)
    assert torch.autograd.grad(loss, here)[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda out: LossOutput(out.detach().sum()), r"calculate_loss: .* 6, .*output.*detach"),
        (lambda out: (out.detach().mean(), {}), r"calculate_loss: .* 2, .*output.*detach"),
        (lambda out: LossOutput(out), r"calculate_loss: .*shape \(3,\).*scalar"),
        (lambda out: LossOutput(6.0), r"calculate_loss: .*float.*scalar"),
        (lambda out: LossOutput({"a": out.sum()}), r"calculate_loss .*\['a'\].*get_loss_weight \[''\]"),
        (lambda out: out.sum(), r"calculate_loss .*Tensor.*LossOutput\(loss_sum, metrics\)"),
        (lambda out: (out.sum(), out.sum()), r"calculate_loss .*tuple.*LossOutput\(loss_sum, metrics\)"),
        (lambda out: LossOutput(out.sum(), {"m": out}), r"'m'.*shape \(3,\)"),
    ],
)
def test_a_broken_contract_is_refused(answer, message):
    taken = normalized(Flow(answer), {"": 3.0})
    with pytest.raises(FlowError, match=message):
        taken(micro_batch(loss=3.0), output())


def test_a_detached_loss_is_accepted_without_gradients():
    taken = normalized(Flow(lambda out: LossOutput(out.sum())), {"": 1.0})
    with torch.no_grad():
        taken(micro_batch(loss=3.0), output())
    assert reduced(taken.sums)[OBJECTIVE] == pytest.approx(2.0)


def test_scalar_metrics_are_averaged_with_the_loss_weight_pairs_and_totals_are_summed():
    kinds = {"pair": (2.0, 4.0), "scalar": 3.0, "total": Total(5.0)}
    taken = normalized(Flow(lambda out: LossOutput(out.sum(), kinds)), {"": 8.0})
    taken(micro_batch(loss=2.0), output())
    kinds.update({"pair": (1.0, 8.0), "scalar": 1.0, "total": Total(1.0)})
    taken(micro_batch(loss=6.0), output())
    values = reduced(taken.sums)
    assert (values["pair"], values["scalar"], values["total"]) == (3.0 / 12.0, (2 * 3.0 + 6 * 1.0) / 8, 6.0)


def test_an_objective_without_any_weight_is_nan():
    assert math.isnan(take_objective({OBJECTIVE: None}, {}))


def test_a_loss_sum_needs_an_explicit_weight_and_the_older_return_does_not():
    without_weight = MicroBatch({}, {}, {"": 1.0}, 2, torch.tensor([4, 4]), 4, has_explicit_weight=False)
    with pytest.raises(FlowError, match=r"loss_mask.*define get_loss_weight"):
        normalized(Flow(lambda out: LossOutput(out.sum())), {"": 1.0})(without_weight, output())
    loss = normalized(Flow(lambda out: (out.mean(), {})), {"": 1.0})(without_weight, output())
    assert loss.item() == pytest.approx(2.0)


def test_a_statistic_without_a_declaration_is_named():
    flow = Flow(lambda output: {}["step_limit"])
    with pytest.raises(FlowError, match=r"'step_limit'.* step_values_from.*'limit'"):
        normalized(flow, {"": 1.0})(micro_batch(loss=1.0), output())
    flow = Flow(lambda output: {}["limit"])
    with pytest.raises(KeyError):
        normalized(flow, {"": 1.0})(micro_batch(loss=1.0), output())
