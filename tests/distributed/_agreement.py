"""Comparisons of layouts with one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from layout_runs import CONFIG

from megatron_wrap.testing import check_parity


def assert_layouts_agree(
    ranks: Any, layouts: Iterable[str], overrides: Iterable[str], samples: Any, config: Path = CONFIG, **arguments: Any
) -> Any:
    """The report of `check_parity` with further `arguments`, of one step without `steps`; every layout ran and
    agrees."""
    report = check_parity(
        config, list(overrides), samples=samples, layouts=list(layouts), ranks=ranks, **{"steps": 1, **arguments}
    )
    assert [row.layout for row in report.rows if row.agrees is not True] == [], report.table()
    return report


def assert_same_gradients(actual: Mapping[str, Any], expected: Mapping[str, Any], relative: float) -> None:
    """The difference of each gradient is at most this part of its norm."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert numpy.linalg.norm(actual[name] - gradient) <= relative * numpy.linalg.norm(gradient), name


def assert_like_one_rank(of_ranks: Sequence[dict[str, Any]], expected: dict[str, Any], relative: float) -> None:
    """Results of `_model_runs.train`: all ranks have the same, which is that of one rank, initial weights bit for
    bit."""
    actual = of_ranks[0]
    for other in of_ranks[1:]:
        for name in actual.keys() - {"embeddings", "gradients"}:
            assert other[name] == actual[name], name
    assert actual["initial"] == expected["initial"]  # digests of all bits
    assert_same_gradients(actual["gradients"], expected["gradients"], relative)
    assert actual["expert_load"] == pytest.approx(expected["expert_load"], rel=1e-5)
    for name in ("losses", "grad_norms", "router_losses"):
        numpy.testing.assert_allclose(actual[name], expected[name], rtol=relative, err_msg=name)
    numpy.testing.assert_allclose(actual["params_norms"], expected["params_norms"], rtol=1e-6)
