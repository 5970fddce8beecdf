"""Metric sums and their reduction. Several `MetricSums` simulate ranks, and adding their vectors the all-reduce."""

import pytest
import torch

from megatron_wrap.errors import FlowError
from megatron_wrap.metrics.metric import Difference, Maximum, MetricSums, Minimum, Total, read_reduced

CPU = torch.device("cpu")


def reduced(*ranks: MetricSums) -> dict[str, float | None]:
    kinds = {name: kind for sums in ranks for name, kind in sums.kinds.items()}
    summed = torch.tensor([sums.summands(kinds) for sums in ranks], dtype=torch.float64).sum(dim=0).tolist()
    largest = torch.tensor([sums.extremes(kinds) for sums in ranks], dtype=torch.float64).amax(dim=0).tolist()
    return read_reduced(kinds, summed, largest)


def test_each_type_is_reduced_over_micro_batches_and_ranks():
    first, second = MetricSums(CPU), MetricSums(CPU)
    first.add({"pair": (torch.tensor(3.0), 4), "scalar": 2, "total": Total(1)}, weight=1.0)
    first.add({"pair": (1.0, torch.tensor(4.0)), "scalar": 4.0, "total": Total(torch.tensor([2]))}, weight=3.0)
    second.add({"pair": (5.0, 2.0), "scalar": 0.5, "total": Total(0.5)}, weight=4.0)
    values = reduced(first, second)
    assert values == {"pair": 9 / 10, "scalar": (1 * 2 + 3 * 4 + 4 * 0.5) / 8, "total": 3.5}


def test_extremes_and_differences_are_of_the_whole_step():
    ranks = [MetricSums(CPU), MetricSums(CPU), MetricSums(CPU)]
    values = [[4.0, -1.0], [2.0], [float("inf")]]
    for index, (sums, of_rank) in enumerate(zip(ranks, values, strict=True)):
        for value in of_rank:
            largest = Maximum(value) if value < 9 else Maximum(-value)
            difference = Difference((value, 2) if index < 2 else (0, 0), (index, 1))
            sums.add({"low": Minimum(torch.tensor(value)), "high": largest, "apart": difference}, weight=1.0)
    assert reduced(*ranks) == {"low": -1.0, "high": 4.0, "apart": 5 / 6 - 3 / 4}
    assert reduced(ranks[2]) == {"low": None, "high": None, "apart": None}


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
    assert not any(number.requires_grad for number in sums.summands(sums.kinds))
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
    with pytest.raises(FlowError, match=r"metric 'm' is a (Total|mean) in one micro-batch and a (mean|Total)"):
        sums.add({"m": second}, weight=1.0)
