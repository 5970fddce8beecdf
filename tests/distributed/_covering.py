"""Which cases of a product every run has: enough for each feature and each parallel axis; `--all` has the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

ONCE = (pytest.mark.matrix, pytest.mark.one_megatron_core)
"""The markers of a case that only `--all` has, on one Megatron-Core: its subject is the formula of a flow."""


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
    other tests have, too."""
    names, chosen = list(cases), set(chosen)
    assert chosen <= set(names), chosen - set(names)
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.matrix) for name in names]


def covering(cases: Iterable[Any], factors: Callable[[Any], set[str]] = axes) -> list[Any]:
    """The cases as parameters of a test, with ids. A greedy choice of them has each factor at least once, evenly; the
    others carry the marker `matrix`.

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
            key=lambda place: (len(of_case[place] & missing), -sum(times[factor] for factor in of_case[place]), -place),
        )
        chosen.add(best)
        times.update(of_case[best])
        missing -= of_case[best]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=named(case),
            marks=() if place in chosen else pytest.mark.matrix,
        )
        for place, case in enumerate(cases)
    ]


def once(parameters: Iterable[Any]) -> list[Any]:
    """The parameters, where those that only `--all` has carry the markers `ONCE`."""
    return [
        pytest.param(*parameter.values, id=parameter.id, marks=ONCE) if parameter.marks else parameter
        for parameter in parameters
    ]
