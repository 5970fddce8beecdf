"""Sums of metrics, and what they read as. Ranks are played by several `MetricSums`, reduced by adding vectors."""

from __future__ import annotations

import pytest
import torch

from megatron_wrap.errors import FlowError
from megatron_wrap.metrics.metric import MetricSums, Total, read_reduced

CPU = torch.device("cpu")


def read(*ranks: MetricSums) -> dict[str, float | None]:
    names = tuple(sorted({name for sums in ranks for name in sums.names}))
    totals = frozenset(name for sums in ranks for name in sums.totals())
    vectors = [torch.stack(sums.vector(names)) for sums in ranks]
    return read_reduced(names, totals, torch.stack(vectors).sum(dim=0).tolist())


def test_each_kind_over_micro_batches_and_ranks():
    first, second = MetricSums(CPU), MetricSums(CPU)
    first.add({"pair": (torch.tensor(3.0), 4), "scalar": 2, "total": Total(1)}, weight=1.0)
    first.add({"pair": (1.0, torch.tensor(4.0)), "scalar": 4.0, "total": Total(torch.tensor([2]))}, weight=3.0)
    second.add({"pair": (5.0, 2.0), "scalar": 0.5, "total": Total(0.5)}, weight=4.0)
    values = read(first, second)
    assert values == {"pair": 9 / 10, "scalar": (1 * 2 + 3 * 4 + 4 * 0.5) / 8, "total": 3.5}


def test_a_rank_that_has_not_seen_a_metric_adds_nothing():
    seen, unseen = MetricSums(CPU), MetricSums(CPU)
    seen.add({"pair": (1.0, 4.0), "total": Total(7)}, weight=1.0)
    assert read(seen, unseen) == read(seen) == {"pair": 0.25, "total": 7.0}


def test_no_weight_is_no_value():
    sums = MetricSums(CPU)
    sums.add({"pair": (0.0, 0.0), "scalar": 5.0, "total": Total(0)}, weight=0.0)
    assert read(sums) == {"pair": None, "scalar": None, "total": 0.0}


def test_sums_are_kept_in_double_precision():
    """A million ones and one more in fp32 would be lost beyond 2^24."""
    sums = MetricSums(CPU)
    sums.add({"total": Total(torch.tensor(2.0**24))}, weight=1.0)
    sums.add({"total": Total(torch.tensor(1.0))}, weight=1.0)
    assert read(sums)["total"] == 2.0**24 + 1


def test_metrics_hold_no_graph_and_are_not_changed_by_later_sums():
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
def test_other_shapes_are_refused(metric, shape):
    with pytest.raises(FlowError, match=f"metric 'm' has shape {shape}; give a scalar, a pair"):
        MetricSums(CPU).add({"m": metric}, weight=1.0)


@pytest.mark.parametrize(("first", "then"), [(Total(1), 1.0), ((1.0, 2.0), Total(1))])
def test_a_change_of_kind_is_refused(first, then):
    sums = MetricSums(CPU)
    sums.add({"m": first}, weight=1.0)
    with pytest.raises(FlowError, match="metric 'm' is a Total in one micro-batch and not in another"):
        sums.add({"m": then}, weight=1.0)
