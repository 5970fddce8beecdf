"""The choice of cases that every run has."""

from __future__ import annotations

from _covering import covering, family_and_axes


def always(parameters):
    return [parameter.id for parameter in parameters if not parameter.marks]


def test_each_factor_is_in_a_case_that_always_runs():
    cases = [(model, layout) for model in ("a-b", "c", "d") for layout in ("one", "tp2", "pp2", "tp2-pp2")]
    result = covering(cases, family_and_axes)
    assert [parameter.values for parameter in result] == cases
    assert always(result) == ["a-b-tp2-pp2", "c-one", "d-one"]
    assert {mark.name for parameter in result for mark in parameter.marks} == {"matrix"}


def test_a_product_without_common_factors_runs_whole():
    assert always(covering({"tp2": 1, "pp2": 2, "cp2": 3})) == ["tp2", "pp2", "cp2"]


def test_equal_gains_are_spread_over_what_was_chosen_least():
    cases = [(flow, layouts) for layouts in ("1", "2") for flow in ("a", "b", "c", "d")]
    assert always(covering(cases)) == ["a-1", "c-1", "b-2", "d-2"]
