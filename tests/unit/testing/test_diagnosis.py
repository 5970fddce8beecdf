"""Diagnosis from numbers; `tests/distributed/test_parity.py` runs real flows."""

import math

import numpy
import pytest

from megatron_wrap.testing.diagnosis import Deviation, likely_cause
from megatron_wrap.testing.layouts import parse_layout
from megatron_wrap.testing.observer import Observer, Seen
from megatron_wrap.testing.parity_comparison import OBJECTIVE_TOLERANCE, metric_differences, relative, rounding_floor
from megatron_wrap.testing.parity_run import CaseResult

GRADIENTS = {"a": numpy.array([1.0, 2.0]), "b": numpy.array([3.0])}


def result(objective: float = 1.0, gradients: dict | None = None, **seen: object) -> CaseResult:
    observations = Seen(**{"two_values": False, "draws_random": False, **seen})  # type: ignore[arg-type]
    return CaseResult([objective], [{}], gradients or GRADIENTS, observations, num_microbatches=4)


def cause(layout: str, of_layout: CaseResult, ratio: float = 1.5, **agrees: object) -> str:
    settings = {"objective_agrees": False, "gradients_agree": False, "worst_metric": "", **agrees}
    deviation = Deviation(parse_layout(layout), of_layout, result(), ratio, **settings)  # type: ignore[arg-type]
    return likely_cause(deviation, lambda: math.nan)


def test_the_cause_names_a_parameter_without_a_gradient():
    without_b = {**GRADIENTS, "b": numpy.array([0.0])}
    message = cause("tp2", result(2.0, without_b))
    assert "1 parameter with a gradient on one process" in message
    assert "such as b:" in message


@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2-sp-cp2", "mbs1"])
def test_random_numbers_in_the_loss_come_before_other_causes(layout: str):
    assert "draws random numbers" in cause(layout, result(2.0, draws_random=True))


def test_a_metric_that_differs_alone_has_its_own_cause():
    correct_loss = {"objective_agrees": True, "gradients_agree": True, "worst_metric": "shown"}
    of_pairs = result(metric_kinds={"shown": "pair"})
    on_cp2 = cause("cp2", of_pairs, **correct_loss)
    assert "'shown'" in on_cp2
    assert "self.sequence_mean" in on_cp2
    assert "'shown' depends on the layout" in cause("pp2", of_pairs, **correct_loss)


def test_sums_of_rows_are_named_on_packed_layouts_unless_equal_samples_agree():
    for layout in ("packed", "packed-tp2-sp", "packed-tp2-sp-cp2", "packed-pp2-vpp2", "packed-dp2"):
        assert "self.sum_per_sequence" in cause(layout, result(2.0))
    assert "self.sum_per_sequence" not in cause("tp2-sp", result(2.0))
    deviation = Deviation(parse_layout("packed"), result(2.0), result(), 1.5, False, False, "")
    assert "mean of means" in likely_cause(deviation, lambda: 1.0)
    metric = {"objective_agrees": True, "gradients_agree": True, "worst_metric": "shown"}
    assert "self.sum_per_sequence" in cause("packed", result(metric_kinds={"shown": "pair"}), **metric)


def test_rounding_errors_of_cancelling_terms_are_not_a_difference():
    """An objective of 3e-9 with terms of size 1: noise of 1e-6 on the outputs changes it by 2e-7."""
    floor = rounding_floor(noisy=2.03e-7, value=3e-9, tolerance=OBJECTIVE_TOLERANCE)
    assert relative(-4e-8, 3e-9, floor) <= OBJECTIVE_TOLERANCE
    assert relative(1e-4, 3e-9, floor) > OBJECTIVE_TOLERANCE
    # without cancellation the floor is far below the value
    assert rounding_floor(8.0 + 4e-7, 8.0, OBJECTIVE_TOLERANCE) < 8.0
    assert rounding_floor(math.nan, 8.0, OBJECTIVE_TOLERANCE) == 0.0


def test_metric_differences_are_those_of_the_worst_step():
    differences = metric_differences([{"m": 2.0}, {"m": 3.0}], [{"m": 2.0}, {"m": 2.0}], [{}, {}])
    assert differences == {"m": (0.5, 3.0, 2.0)}
    assert metric_differences([{}], [{"m": 2.0}], [{}])["m"][0] == math.inf


def test_names_that_change_between_micro_batches_are_refused(monkeypatch: pytest.MonkeyPatch):
    from megatron_wrap.errors import FlowError
    from megatron_wrap.parallel.state import Axis, ParallelState
    from megatron_wrap.testing import observer

    monkeypatch.setattr(observer, "gather_objects", lambda local: [local])
    one_rank = Axis(1, 0, None)  # type: ignore[arg-type]
    alone = ParallelState(*[one_rank] * 9, None)
    seen = Observer(calls=[{"a": ("number", 1.0, 0.0)}, {"a": ("number", 2.0, 0.0)}]).seen(object(), alone)
    assert seen.metric_kinds == {"a": "number"}
    with pytest.raises(FlowError, match=r"\['a'\].*\['b'\]"):
        Observer(calls=[{"a": ("number", 1.0, 0.0)}, {"b": ("number", 2.0, 0.0)}]).seen(object(), alone)
