"""Which cases of a product run in every command: enough for each feature and each parallel axis; `--all` runs all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

EACH_AXIS = ("mbs1", "padded", "dp2-dopt", "tp2-sp", "pp2-vpp2", "cp2", "packed", "token-budget-dp2")
"""Layouts of check-parity, one for each parallel axis and each way to cut a batch."""


def axes(case: Any) -> set[str]:
    """The parts of a case's name: those of tp2-pp2 are tp2 and pp2."""
    return set(named(case).split("-"))


def family_and_axes(case: tuple[str, ...]) -> set[str]:
    """The first of a tuple as a whole, and the parts of the others: mixtral-8x7b, tp2, pp2."""
    return {case[0], *axes(case[1:])}


def named(case: Any) -> str:
    """The id of a case: its own name or itself, or those of the elements of a tuple joined."""
    if isinstance(case, tuple):
        return "-".join(map(named, case))
    return getattr(case, "name", None) or getattr(case, "__name__", None) or str(case)


def quick(cases: Iterable[str], chosen: Iterable[str]) -> list[Any]:
    """The cases as parameters of a test; those that are not `chosen` carry the marker `matrix`. For cases whose factors
    other tests contain."""
    names, chosen = list(cases), set(chosen)
    assert chosen <= set(names), chosen - set(names)
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.matrix) for name in names]


def covering(cases: Iterable[Any], factors: Callable[[Any], set[str]] = axes) -> list[Any]:
    """The cases as parameters of a test, with ids. A greedy choice contains each factor at least once, evenly; the
    other cases carry the marker `matrix`.

    Args:
        cases: each one parameter, or a tuple of them.
        factors: the features and axes of a case.
    """
    cases = list(cases)
    of_case = [factors(case) for case in cases]
    missing = set().union(*of_case)
    chosen: set[int] = set()
    times: Counter[str] = Counter()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda index: (len(of_case[index] & missing), -sum(times[factor] for factor in of_case[index]), -index),
        )
        chosen.add(best)
        times.update(of_case[best])
        missing -= of_case[best]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=named(case),
            marks=() if index in chosen else pytest.mark.matrix,
        )
        for index, case in enumerate(cases)
    ]


def each_axis_and_some(layouts: Iterable[str], number: int, count: int) -> list[str]:
    """`EACH_AXIS`, and `count` of the other layouts in rotation, so that flows number 0, 1, ... together have all."""
    others = [layout for layout in layouts if layout not in EACH_AXIS]
    return [*EACH_AXIS, *(others[(number * count + position) % len(others)] for position in range(count))]
