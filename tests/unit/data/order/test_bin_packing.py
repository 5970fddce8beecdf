"""Assignment of sequences to bins, and of bins to replicas. Plain arithmetic on lengths."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest

from megatron_wrap.data.order import bin_packing as packing
from megatron_wrap.errors import DataError

CAPACITY, WINDOW = 4096, 1024


def log_normal_mix(count: int, seed: int = 0) -> list[int]:
    """Lengths in tokens with median 350 and sigma 1.0, cut at 4,096."""
    drawn = numpy.exp(numpy.random.default_rng(seed).normal(numpy.log(350), 1.0, count))
    return [int(length) for length in numpy.clip(numpy.round(drawn), 1, CAPACITY)]


def assert_legal(bins: list[list[int]], lengths: list[int], capacity: int) -> None:
    """Every item in one bin, no bin empty or too full, all in ascending order."""
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(len(items) > 0 and sum(lengths[item] for item in items) <= capacity for items in bins)
    assert bins == sorted(sorted(items) for items in bins)


def optimal_number_of_bins(lengths: list[int], capacity: int) -> int:
    """The fewest bins, by trying every assignment."""
    for count in range(1, len(lengths) + 1):
        for positions in itertools.product(range(count), repeat=len(lengths)):
            sums = [0] * count
            for length, position in zip(lengths, positions, strict=True):
                sums[position] += length
            if max(sums) <= capacity:
                return count
    return 0


def test_best_fit_decreasing_is_near_the_optimum_of_all_assignments():
    generator = random.Random(1)
    differences = []
    for _ in range(60):
        lengths = [generator.randint(1, 10) for _ in range(generator.randint(1, 6))]
        bins = packing.best_fit_decreasing(lengths, 10)
        assert_legal(bins, lengths, 10)
        differences.append(len(bins) - optimal_number_of_bins(lengths, 10))
    assert set(differences) <= {0, 1}
    assert differences.count(0) >= 57


def test_each_item_goes_into_the_bin_with_the_least_room():
    assert packing.best_fit_decreasing([2, 3, 7, 8], 10) == [[0, 3], [1, 2]]
    assert packing.best_fit_decreasing([4, 5, 6, 3], 10) == [[0, 2], [1, 3]]
    assert packing.best_fit_decreasing([], 10) == []


def test_a_hundred_thousand_lengths_take_few_list_operations(monkeypatch):
    """Two searches in a sorted list for each item, so the work is that of sorting."""
    calls = {"bisect_left": 0, "insort": 0}

    def counted(name):
        original = getattr(packing, name)

        def function(*arguments):
            calls[name] += 1
            return original(*arguments)

        return function

    for name in calls:
        monkeypatch.setattr(packing, name, counted(name))
    lengths = log_normal_mix(100_000)
    bins = packing.best_fit_decreasing(lengths, CAPACITY)
    assert calls == {"bisect_left": 100_000, "insort": 100_000}
    assert_legal(bins, lengths, CAPACITY)
    assert sum(lengths) / (CAPACITY * len(bins)) > 0.999


@pytest.mark.parametrize("seed", range(3))
def test_windows_of_the_mix_are_packed_with_an_efficiency_of_97_percent(seed):
    lengths = log_normal_mix(20 * WINDOW, seed)
    windows = [lengths[start : start + WINDOW] for start in range(0, len(lengths), WINDOW)]
    efficiencies = [sum(window) / (CAPACITY * len(packing.best_fit_decreasing(window, CAPACITY))) for window in windows]
    assert min(efficiencies) >= 0.97


def test_consecutive_items_stay_together_where_that_takes_no_more_bins():
    lengths = [6, 4, 5, 5, 9, 1]
    assert packing.consecutive_bins(lengths, 10) == [[0, 1], [2, 3], [4, 5]]
    assert packing.fewest_bins(lengths, 10) == [[0, 1], [2, 3], [4, 5]]
    # best fit needs fewer: 6 + 4 and 5 + 5
    assert packing.fewest_bins([6, 5, 5, 4], 10) == [[0, 3], [1, 2]]
    assert len(packing.consecutive_bins([6, 5, 5, 4], 10)) == 3


def test_listed_bin_by_bin_a_window_takes_no_more_bins_than_before():
    lengths = log_normal_mix(WINDOW, seed=4)
    bins = packing.best_fit_decreasing(lengths, CAPACITY)
    in_order = [lengths[item] for items in bins for item in items]
    again = packing.fewest_bins(in_order, CAPACITY)
    assert_legal(again, in_order, CAPACITY)
    assert len(again) <= len(bins)
    assert [item for items in again for item in items] == list(range(WINDOW))


@pytest.mark.parametrize("function", [packing.best_fit_decreasing, packing.consecutive_bins, packing.fewest_bins])
def test_an_item_longer_than_a_bin_is_refused(function):
    with pytest.raises(DataError, match=r"11 tokens.*10"):
        function([3, 11], 10)


def test_even_bins_have_about_equal_cost_and_exactly_the_count():
    lengths = log_normal_mix(256, seed=5)
    costs = [length + length**2 / 2000 for length in lengths]
    bins = packing.even_bins(lengths, costs, 8 * CAPACITY, 8)
    assert bins is not None
    assert len(bins) == 8
    assert_legal(bins, lengths, 8 * CAPACITY)
    totals = [sum(costs[item] for item in items) for items in bins]
    assert max(totals) <= 1.01 * min(totals)


def test_even_bins_respect_the_capacity_or_there_are_none():
    # the cheapest bin has no room for the third item, so it goes into the other
    assert packing.even_bins([6, 5, 4], [1.0, 5.0, 0.5], 10, 2) == [[0, 2], [1]]
    assert packing.even_bins([6, 6, 6], [1.0, 1.0, 1.0], 10, 2) is None  # no bin for the third
    assert packing.even_bins([1], [1.0], 10, 2) is None  # a bin without an item


def test_split_bins_divides_the_most_expensive_bin_of_several_items():
    costs = [1.0, 5.0, 4.0, 100.0]
    assert packing.split_bins([[0, 1, 2], [3]], costs, 3) == [[0, 2], [1], [3]]
    assert packing.split_bins([[0, 1, 2], [3]], costs, 9) == [[0], [1], [2], [3]]
    assert packing.split_bins([[0, 1]], costs, 1) == [[0, 1]]


def test_rows_of_similar_width_count_the_padding_to_the_widest():
    widths, rows = [3, 8, 4, 7], [1, 1, 2, 1]
    bins = packing.rows_of_similar_width(widths, rows, 16)
    assert bins == [[1, 3], [0, 2]]
    assert packing.rows_of_similar_width(widths, rows, 16, float, limit=9.0) == [[1], [3], [2], [0]]
    with pytest.raises(DataError, match=r"18 tokens.*16"):
        packing.rows_of_similar_width([9], [2], 16)


def test_even_rows_have_the_least_cost_of_their_most_expensive_bin():
    generator = random.Random(2)

    def cost(width: int) -> float:
        return width + width**2 / 50

    for _ in range(40):
        widths = sorted((generator.randint(1, 20) for _ in range(generator.randint(3, 8))), reverse=True)
        rows, capacity = [1] * len(widths), 60
        count = len(packing.rows_of_similar_width(widths, rows, capacity)) + generator.randint(0, 2)
        bins = packing.even_rows(widths, rows, capacity, count, cost)
        assert len(bins) <= count
        assert sorted(item for items in bins for item in items) == list(range(len(widths)))
        assert all(len(items) * max(widths[item] for item in items) <= capacity for items in bins)
        most = max(len(items) * cost(max(widths[item] for item in items)) for items in bins)
        assert most == pytest.approx(_least_most_expensive(widths, capacity, count, cost))


def _least_most_expensive(widths, capacity, count, cost) -> float:
    """Over all divisions of the widths, in their order, into at most `count` bins."""
    best = float("inf")
    for cuts in range(count):
        for positions in itertools.combinations(range(1, len(widths)), cuts):
            bounds = [0, *positions, len(widths)]
            bins = [widths[a:b] for a, b in itertools.pairwise(bounds)]
            if all(len(items) * items[0] <= capacity for items in bins):
                best = min(best, max(len(items) * cost(items[0]) for items in bins))
    return best


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_have_equal_sizes_and_about_equal_costs(groups):
    costs = [length + length**2 / 2000 for length in log_normal_mix(256, seed=6)]
    assigned = packing.assign_evenly(costs, groups)
    assert [len(group) for group in assigned] == [256 // groups] * groups
    assert sorted(item for group in assigned for item in group) == list(range(256))
    totals = [sum(costs[item] for item in group) for group in assigned]
    assert max(totals) <= 1.002 * sum(totals) / groups


def test_items_are_exchanged_until_the_groups_are_even():
    # the most expensive first gives 8 + 4 + 4 and 7 + 6 + 5; exchanging 5 and 4 gives 17 and 17
    costs = [8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    totals = [sum(costs[item] for item in group) for group in packing.assign_evenly(costs, 2)]
    assert totals == [17.0, 17.0]
    assert packing.assign_evenly([], 3) == [[], [], []]
