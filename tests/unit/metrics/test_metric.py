"""Metric sums and their reduction. Several `MetricSums` simulate ranks, and adding their vectors the all-reduce."""

from __future__ import annotations

import pytest
import torch

from megatron_wrap.errors import FlowError
from megatron_wrap.metrics.metric import MetricSums, Total, read_reduced

CPU = torch.device("cpu")


def reduced(*ranks: MetricSums) -> dict[str, float | None]:
    names = tuple(sorted({name for sums in ranks for name in sums.names}))
    totals = frozenset(name for sums in ranks for name in sums.totals())
    vectors = [torch.stack(sums.vector(names)) for sums in ranks]
    return read_reduced(names, totals, torch.stack(vectors).sum(dim=0).tolist())


def test_each_type_is_reduced_over_micro_batches_and_ranks():
    first, second = MetricSums(CPU), MetricSums(CPU)
    first.add({"pair": (torch.tensor(3.0), 4), "scalar": 2, "total": Total(1)}, weight=1.0)
    first.add({"pair": (1.0, torch.tensor(4.0)), "scalar": 4.0, "total": Total(torch.tensor([2]))}, weight=3.0)
    second.add({"pair": (5.0, 2.0), "scalar": 0.5, "total": Total(0.5)}, weight=4.0)
    values = reduced(first, second)
    assert values == {"pair": 9 / 10, "scalar": (1 * 2 + 3 * 4 + 4 * 0.5) / 8, "total": 3.5}


def test_rank_without_a_metric_contributes_nothing():
    present, missing = MetricSums(CPU), MetricSums(CPU)
    present.add({"pair": (1.0, 4.0), "total": Total(7)}, weight=1.0)
    assert reduced(present, missing) == reduced(present) == {"pair": 0.25, "total": 7.0}


def test_metric_without_weight_is_none():
    sums = MetricSums(CPU)
    sums.add({"pair": (0.0, 0.0), "scalar": 5.0, "total": Total(0)}, weight=0.0)
    assert reduced(sums) == {"pair": None, "scalar": None, "total": 0.0}


def test_sums_are_fp64():
    """In fp32, 2^24 + 1 would be rounded to 2^24."""
    sums = MetricSums(CPU)
    sums.add({"total": Total(torch.tensor(2.0**24))}, weight=1.0)
    sums.add({"total": Total(torch.tensor(1.0))}, weight=1.0)
    assert reduced(sums)["total"] == 2.0**24 + 1


def test_metrics_are_detached_and_not_modified_by_later_sums():
    value = torch.tensor(2.0, requires_grad=True, dtype=torch.float64)
    sums = MetricSums(CPU)
    sums.add({"pair": (value, value)}, weight=1.0)
    sums.add({"pair": (value, value)}, weight=1.0)
    assert not any(number.requires_grad for number in sums.vector(sums.names))
    assert value.item() == 2.0


@pytest.mark.parametrize(
    ("metric", "shape"),
    [(torch.ones(3), r"\(3,\)"), ((torch.ones(2), 1.0), r"\(2,\)"), (Total(torch.ones(0)), r"\(0,\)")],
)
def test_non_scalar_metrics_are_refused(metric, shape):
    with pytest.raises(FlowError, match=f"metric 'm' has shape {shape}; .*scalar"):
        MetricSums(CPU).add({"m": metric}, weight=1.0)


@pytest.mark.parametrize(("first", "second"), [(Total(1), 1.0), ((1.0, 2.0), Total(1))])
def test_change_of_type_is_refused(first, second):
    sums = MetricSums(CPU)
    sums.add({"m": first}, weight=1.0)
    with pytest.raises(FlowError, match="metric 'm' is a Total in one micro-batch"):
        sums.add({"m": second}, weight=1.0)
