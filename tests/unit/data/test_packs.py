"""Assignment of sequences to packs, and of packs to replicas. Plain arithmetic on lengths."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest

from megatron_wrap.data import packing
from megatron_wrap.errors import DataError

CAPACITY, WINDOW = 4096, 1024


def log_normal_mix(count: int, seed: int = 0) -> list[int]:
    """Lengths in tokens with median 350 and sigma 1.0, cut at 4,096."""
    drawn = numpy.exp(numpy.random.default_rng(seed).normal(numpy.log(350), 1.0, count))
    return [int(length) for length in numpy.clip(numpy.round(drawn), 1, CAPACITY)]


def assert_legal(packs: list[list[int]], lengths: list[int], capacity: int) -> None:
    """Every item in one pack, no pack empty or too full, all in ascending order."""
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    assert all(len(pack) > 0 and sum(lengths[item] for item in pack) <= capacity for pack in packs)
    assert packs == sorted(sorted(pack) for pack in packs)


def optimal_number_of_packs(lengths: list[int], capacity: int) -> int:
    """The fewest packs, by trying every assignment."""
    for count in range(1, len(lengths) + 1):
        for places in itertools.product(range(count), repeat=len(lengths)):
            sums = [0] * count
            for length, place in zip(lengths, places, strict=True):
                sums[place] += length
            if max(sums) <= capacity:
                return count
    return 0


def test_best_fit_decreasing_is_near_the_optimum_of_all_assignments():
    generator = random.Random(1)
    differences = []
    for _ in range(60):
        lengths = [generator.randint(1, 10) for _ in range(generator.randint(1, 6))]
        packs = packing.best_fit_decreasing(lengths, 10)
        assert_legal(packs, lengths, 10)
        differences.append(len(packs) - optimal_number_of_packs(lengths, 10))
    assert set(differences) <= {0, 1}
    assert differences.count(0) >= 57


def test_each_item_goes_into_the_pack_with_the_least_room():
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
    packs = packing.best_fit_decreasing(lengths, CAPACITY)
    assert calls == {"bisect_left": 100_000, "insort": 100_000}
    assert_legal(packs, lengths, CAPACITY)
    assert sum(lengths) / (CAPACITY * len(packs)) > 0.999


@pytest.mark.parametrize("seed", range(3))
def test_windows_of_the_mix_are_packed_with_an_efficiency_of_97_percent(seed):
    lengths = log_normal_mix(20 * WINDOW, seed)
    windows = [lengths[start : start + WINDOW] for start in range(0, len(lengths), WINDOW)]
    efficiencies = [sum(window) / (CAPACITY * len(packing.best_fit_decreasing(window, CAPACITY))) for window in windows]
    assert min(efficiencies) >= 0.97


def test_consecutive_items_stay_together_where_that_takes_no_more_packs():
    lengths = [6, 4, 5, 5, 9, 1]
    assert packing.consecutive_packs(lengths, 10) == [[0, 1], [2, 3], [4, 5]]
    assert packing.fewest_packs(lengths, 10) == [[0, 1], [2, 3], [4, 5]]
    # best fit needs fewer: 6 + 4 and 5 + 5
    assert packing.fewest_packs([6, 5, 5, 4], 10) == [[0, 3], [1, 2]]
    assert len(packing.consecutive_packs([6, 5, 5, 4], 10)) == 3


def test_listed_pack_by_pack_a_window_takes_no_more_packs_than_before():
    lengths = log_normal_mix(WINDOW, seed=4)
    packs = packing.best_fit_decreasing(lengths, CAPACITY)
    in_order = [lengths[item] for pack in packs for item in pack]
    again = packing.fewest_packs(in_order, CAPACITY)
    assert_legal(again, in_order, CAPACITY)
    assert len(again) <= len(packs)
    assert [item for pack in again for item in pack] == list(range(WINDOW))


@pytest.mark.parametrize("function", [packing.best_fit_decreasing, packing.consecutive_packs, packing.fewest_packs])
def test_an_item_longer_than_a_pack_is_refused(function):
    with pytest.raises(DataError, match=r"11 tokens.*10"):
        function([3, 11], 10)


def test_even_packs_have_about_equal_cost_and_exactly_the_count():
    lengths = log_normal_mix(256, seed=5)
    costs = [length + length**2 / 2000 for length in lengths]
    packs = packing.even_packs(lengths, costs, 8 * CAPACITY, 8)
    assert packs is not None
    assert len(packs) == 8
    assert_legal(packs, lengths, 8 * CAPACITY)
    totals = [sum(costs[item] for item in pack) for pack in packs]
    assert max(totals) <= 1.01 * min(totals)


def test_even_packs_respect_the_capacity_or_there_are_none():
    # the cheapest pack has no room for the third item, so it goes into the other
    assert packing.even_packs([6, 5, 4], [1.0, 5.0, 0.5], 10, 2) == [[0, 2], [1]]
    assert packing.even_packs([6, 6, 6], [1.0, 1.0, 1.0], 10, 2) is None  # no pack for the third
    assert packing.even_packs([1], [1.0], 10, 2) is None  # a pack without an item


def test_split_packs_divides_the_most_expensive_pack_of_several_items():
    costs = [1.0, 5.0, 4.0, 100.0]
    assert packing.split_packs([[0, 1, 2], [3]], costs, 3) == [[0, 2], [1], [3]]
    assert packing.split_packs([[0, 1, 2], [3]], costs, 9) == [[0], [1], [2], [3]]
    assert packing.split_packs([[0, 1]], costs, 1) == [[0, 1]]


def test_rows_of_similar_width_count_the_padding_to_the_widest():
    widths, rows = [3, 8, 4, 7], [1, 1, 2, 1]
    packs = packing.rows_of_similar_width(widths, rows, 16)
    assert packs == [[1, 3], [0, 2]]
    assert packing.rows_of_similar_width(widths, rows, 16, float, limit=9.0) == [[1], [3], [2], [0]]
    with pytest.raises(DataError, match=r"18 tokens.*16"):
        packing.rows_of_similar_width([9], [2], 16)


def test_even_rows_have_the_least_cost_of_their_most_expensive_pack():
    generator = random.Random(2)

    def cost(width: int) -> float:
        return width + width**2 / 50

    for _ in range(40):
        widths = sorted((generator.randint(1, 20) for _ in range(generator.randint(3, 8))), reverse=True)
        rows, capacity = [1] * len(widths), 60
        count = len(packing.rows_of_similar_width(widths, rows, capacity)) + generator.randint(0, 2)
        packs = packing.even_rows(widths, rows, capacity, count, cost)
        assert len(packs) <= count
        assert sorted(item for pack in packs for item in pack) == list(range(len(widths)))
        assert all(len(pack) * max(widths[item] for item in pack) <= capacity for pack in packs)
        most = max(len(pack) * cost(max(widths[item] for item in pack)) for pack in packs)
        assert most == pytest.approx(_least_most_expensive(widths, capacity, count, cost))


def _least_most_expensive(widths, capacity, count, cost) -> float:
    """Over all divisions of the widths, in their order, into at most `count` packs."""
    best = float("inf")
    for cuts in range(count):
        for places in itertools.combinations(range(1, len(widths)), cuts):
            bounds = [0, *places, len(widths)]
            packs = [widths[a:b] for a, b in itertools.pairwise(bounds)]
            if all(len(pack) * pack[0] <= capacity for pack in packs):
                best = min(best, max(len(pack) * cost(pack[0]) for pack in packs))
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
