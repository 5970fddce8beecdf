"""Causes that are told from numbers alone; `tests/distributed/test_parity.py` has them from real flows."""

from __future__ import annotations

import math

import numpy
import pytest

from megatron_wrap.testing.comparison import OBJECTIVE_TOLERANCE, metric_differences, relative, rounding_floor
from megatron_wrap.testing.diagnosis import Deviation, likely_cause
from megatron_wrap.testing.layouts import parse_layout
from megatron_wrap.testing.observer import Observer, Seen
from megatron_wrap.testing.parity_run import CaseResult

GRADIENTS = {"a": numpy.array([1.0, 2.0]), "b": numpy.array([3.0])}


def result(objective: float = 1.0, gradients: dict | None = None, **seen: object) -> CaseResult:
    told = Seen(**{"two_values": False, "draws_random": False, **seen})  # type: ignore[arg-type]
    return CaseResult([objective], [{}], gradients or GRADIENTS, told, num_microbatches=4)


def cause(layout: str, found: CaseResult, ratio: float = 1.5, **agrees: object) -> str:
    settings = {"objective_agrees": False, "gradients_agree": False, "worst_metric": "", **agrees}
    deviation = Deviation(parse_layout(layout), found, result(), ratio, **settings)  # type: ignore[arg-type]
    return likely_cause(deviation, lambda: False)


def test_a_parameter_without_a_gradient_on_a_layout_is_named():
    silent = {**GRADIENTS, "b": numpy.array([0.0])}
    assert "1 parameters with a gradient on one process get none here, such as b" in cause("tp2", result(2.0, silent))


@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2-sp-cp2", "mbs1"])
def test_random_numbers_in_the_loss_come_before_other_causes(layout: str):
    assert "calculate_loss draws random numbers" in cause(layout, result(2.0, draws_random=True))


def test_a_metric_alone_is_told_apart_from_the_loss():
    right = {"objective_agrees": True, "gradients_agree": True, "worst_metric": "shown"}
    of_pairs = result(metric_kinds={"shown": "pair"})
    assert "counts on each context-parallel rank what is complete" in cause("cp2", of_pairs, **right)
    assert cause("pp2", of_pairs, **right) == "metric 'shown' depends on the layout, the loss does not"


def test_rounding_of_what_cancels_is_no_difference():
    """An objective of 3e-9 whose terms are of size 1: noise of 1e-6 on the outputs moves it by 2e-7."""
    floor = rounding_floor(moved=2.03e-7, value=3e-9, tolerance=OBJECTIVE_TOLERANCE)
    assert relative(-4e-8, 3e-9, floor) <= OBJECTIVE_TOLERANCE
    assert relative(1e-4, 3e-9, floor) > OBJECTIVE_TOLERANCE
    # of a number that does not cancel, the floor lies far below the number itself
    assert rounding_floor(8.0 + 4e-7, 8.0, OBJECTIVE_TOLERANCE) < 8.0
    assert rounding_floor(math.nan, 8.0, OBJECTIVE_TOLERANCE) == 0.0


def test_the_worst_step_of_a_metric_is_shown():
    found = metric_differences([{"m": 2.0}, {"m": 3.0}], [{"m": 2.0}, {"m": 2.0}], [{}, {}])
    assert found == {"m": (0.5, 3.0, 2.0)}
    assert metric_differences([{}], [{"m": 2.0}], [{}])["m"][0] == math.inf


def test_names_that_change_between_micro_batches_are_refused(monkeypatch: pytest.MonkeyPatch):
    from megatron_wrap.errors import FlowError
    from megatron_wrap.parallel.state import Axis, ParallelState
    from megatron_wrap.testing import observer

    monkeypatch.setattr(observer, "gather_objects", lambda told: [told])
    one = Axis(1, 0, None)  # type: ignore[arg-type]
    alone = ParallelState(*[one] * 9, None)
    seen = Observer(calls=[{"a": ("number", 1.0, 0.0)}, {"a": ("number", 2.0, 0.0)}]).seen(object(), alone)
    assert seen.metric_kinds == {"a": "number"}
    with pytest.raises(FlowError, match=r"metrics \['a'\] in one micro-batch and \['b'\] in another"):
        Observer(calls=[{"a": ("number", 1.0, 0.0)}, {"b": ("number", 2.0, 0.0)}]).seen(object(), alone)
