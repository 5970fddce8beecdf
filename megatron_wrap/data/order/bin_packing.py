"""Assigns sequences to bins of limited length, and bins to replicas with equal work. Plain arithmetic on lengths: every
process computes the same result."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from megatron_wrap.errors import DataError


def fewest_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of items whose lengths sum to at most `capacity`: consecutive ones if that takes no more bins than best
    fit, so that items that are already listed bin by bin stay together.

    Args:
        lengths: of each item, in tokens.
        capacity: of a bin, in tokens.

    Returns:
        The indices of each bin's items, ascending; bins in the order of their first items.

    Raises:
        DataError: an item is longer than a bin.
    """
    in_order, best = consecutive_bins(lengths, capacity), best_fit_decreasing(lengths, capacity)
    return in_order if len(in_order) <= len(best) else best


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest item first, each into the bin with the least room that still holds it (Johnson, 1973): at most 11/9 of
    the optimal number of bins plus one. O(n log n) comparisons. Arguments, result and errors of `fewest_bins`."""
    _check(lengths, capacity)
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, index of the bin), ascending
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        index = bisect_left(rooms, (lengths[item], -1))
        if index == len(rooms):
            room, number = capacity, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(index)
        bins[number].append(item)
        insort(rooms, (room - lengths[item], number))
    return sorted(sorted(items) for items in bins)


def consecutive_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The fewest bins of consecutive items. Arguments, result and errors of `fewest_bins`."""
    _check(lengths, capacity)
    bins: list[list[int]] = []
    room = 0
    for item, length in enumerate(lengths):
        if not bins or length > room:
            bins.append([])
            room = capacity
        bins[-1].append(item)
        room -= length
    return bins


def even_bins(lengths: Sequence[int], costs: Sequence[float], capacity: int, count: int) -> list[list[int]] | None:
    """`count` bins of about equal cost: the most expensive item first, each into the cheapest bin that holds it
    (Graham's rule with limited room).

    Args:
        costs: of each item, in any unit.

    Returns:
        As `fewest_bins`, with exactly `count` bins; None if the rule leaves an item without a bin, or a bin without
        an item.
    """
    _check(lengths, capacity)
    bins: list[list[int]] = [[] for _ in range(count)]
    rooms = [capacity] * count
    queue = [(0.0, number) for number in range(count)]
    for item in sorted(range(len(lengths)), key=lambda item: (-costs[item], item)):
        full = []
        while queue and rooms[queue[0][1]] < lengths[item]:
            full.append(heapq.heappop(queue))
        if not queue:
            return None
        cost, number = heapq.heappop(queue)
        bins[number].append(item)
        rooms[number] -= lengths[item]
        for entry in (*full, (cost + costs[item], number)):
            heapq.heappush(queue, entry)
    return sorted(sorted(items) for items in bins) if all(bins) else None


def rows_of_similar_width(
    widths: Sequence[int],
    rows: Sequence[int],
    capacity: int,
    cost: Callable[[int], float] = float,
    limit: float = math.inf,
) -> list[list[int]]:
    """Bins of items whose rows are all padded to the widest one: the widest item first, as many together as fit.

    Args:
        widths: of each item's rows, in tokens.
        rows: number of rows of each item.
        capacity: of a bin, in tokens: its rows times its width.
        cost: of a row of a width, in any unit.
        limit: largest cost of a bin of several items.

    Returns:
        The indices of each bin's items, ascending; the bins of wider items first.

    Raises:
        DataError: an item is larger than a bin.
    """
    _check([width * count for width, count in zip(widths, rows, strict=True)], capacity)
    bins: list[list[int]] = []
    height = width = 0
    for item in sorted(range(len(widths)), key=lambda item: (-widths[item], item)):
        taller = height + rows[item]
        if not bins or taller * width > capacity or taller * cost(width) > limit:
            bins.append([])
            taller, width = rows[item], widths[item]
        bins[-1].append(item)
        height = taller
    return [sorted(items) for items in bins]


def even_rows(
    widths: Sequence[int], rows: Sequence[int], capacity: int, count: int, cost: Callable[[int], float]
) -> list[list[int]]:
    """`rows_of_similar_width` in at most `count` bins, with the smallest `limit` that takes no more of them, found by
    bisection, so that their costs are about equal. `capacity` must allow `count` bins."""
    bins = rows_of_similar_width(widths, rows, capacity)
    low = 0.0
    high = max(sum(rows[item] for item in items) * cost(max(widths[item] for item in items)) for items in bins)
    for _ in range(30):
        limit = (low + high) / 2
        tried = rows_of_similar_width(widths, rows, capacity, cost, limit)
        if len(tried) <= count:
            bins, high = tried, limit
        else:
            low = limit
    return bins


def split_bins(bins: Sequence[Sequence[int]], costs: Sequence[float], count: int) -> list[list[int]]:
    """Split the most expensive of the bins with several items until there are `count` bins; fewer if every bin has one
    item."""
    divided = [list(items) for items in bins]
    while len(divided) < count:
        divided.sort(key=lambda items: (len(items) > 1, sum(costs[item] for item in items)))
        if not divided or len(divided[-1]) < 2:
            break
        whole = divided.pop()
        halves: tuple[list[int], list[int]] = ([], [])
        totals = [0.0, 0.0]
        for item in sorted(whole, key=lambda item: (-costs[item], item)):
            cheaper = totals.index(min(totals))
            halves[cheaper].append(item)
            totals[cheaper] += costs[item]
        divided += halves
    return sorted(sorted(items) for items in divided)


def assign_evenly(costs: Sequence[float], groups: int) -> list[list[int]]:
    """Items in `groups` groups of equal size with about equal total cost: the most expensive item first, each to the
    cheapest group with room (Graham, 1969), then exchanges of items between the most and the least expensive group
    while they reduce the difference.

    Args:
        costs: a multiple of `groups` of them.

    Returns:
        The indices of each group's items, ascending.
    """
    size = len(costs) // groups
    assigned: list[list[int]] = [[] for _ in range(groups)]
    totals = [0.0] * groups
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        group = min((group for group in range(groups) if len(assigned[group]) < size), key=lambda g: (totals[g], g))
        assigned[group].append(item)
        totals[group] += costs[item]
    while _exchange(assigned, totals, costs):
        pass
    return [sorted(group) for group in assigned]


def _exchange(assigned: list[list[int]], totals: list[float], costs: Sequence[float]) -> bool:
    """Exchange the two items of the most and the least expensive group that bring the totals closest; False if no
    exchange reduces their difference by at least a thousandth of a total."""
    high, low = totals.index(max(totals)), totals.index(min(totals))
    difference = totals[high] - totals[low]
    if difference <= 1e-3 * totals[high]:
        return False
    by_cost = sorted(assigned[low], key=lambda item: costs[item])
    best: tuple[float, int, int] | None = None
    for item in assigned[high]:
        index = bisect_left(by_cost, costs[item] - difference / 2, key=lambda other: costs[other])
        for other in by_cost[max(0, index - 1) : index + 1]:
            left = abs(difference - 2 * (costs[item] - costs[other]))
            if best is None or left < best[0]:
                best = (left, item, other)
    if best is None or best[0] > difference - 1e-3 * totals[high]:
        return False
    _, item, other = best
    assigned[high].remove(item)
    assigned[low].remove(other)
    assigned[high].append(other)
    assigned[low].append(item)
    moved = costs[item] - costs[other]
    totals[high] -= moved
    totals[low] += moved
    return True


def _check(lengths: Sequence[int], capacity: int) -> None:
    longest = max(lengths, default=0)
    if longest > capacity:
        raise DataError(f"an item of {longest} tokens does not fit into a bin of {capacity}; make bins larger")
