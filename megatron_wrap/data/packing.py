"""Assignment of sequences to packs of limited length, and of packs to replicas with equal work. Plain arithmetic on
lengths: every process computes the same result."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from megatron_wrap.errors import DataError


def fewest_packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs of items whose lengths sum to at most `capacity`: consecutive ones if that takes no more packs than best
    fit, so that items that are already listed pack by pack stay together.

    Args:
        lengths: of each item, in tokens.
        capacity: of a pack, in tokens.

    Returns:
        The indices of each pack's items, ascending; packs in the order of their first items.

    Raises:
        DataError: an item is longer than a pack.
    """
    in_order, best = consecutive_packs(lengths, capacity), best_fit_decreasing(lengths, capacity)
    return in_order if len(in_order) <= len(best) else best


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest item first, each into the pack with the least room that still holds it (Johnson, 1973): at most 11/9 of
    the optimal number of packs plus one. O(n log n) comparisons. Arguments, result and errors of `fewest_packs`."""
    _check(lengths, capacity)
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, pack), ascending
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        place = bisect_left(rooms, (lengths[item], -1))
        if place == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room, pack = rooms.pop(place)
        packs[pack].append(item)
        insort(rooms, (room - lengths[item], pack))
    return sorted(sorted(pack) for pack in packs)


def consecutive_packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The fewest packs of consecutive items. Arguments, result and errors of `fewest_packs`."""
    _check(lengths, capacity)
    packs: list[list[int]] = []
    room = 0
    for item, length in enumerate(lengths):
        if not packs or length > room:
            packs.append([])
            room = capacity
        packs[-1].append(item)
        room -= length
    return packs


def even_packs(lengths: Sequence[int], costs: Sequence[float], capacity: int, count: int) -> list[list[int]] | None:
    """`count` packs of about equal cost: the most expensive item first, each into the cheapest pack that holds it
    (Graham's rule with limited room).

    Args:
        costs: of each item, in any unit.

    Returns:
        As `fewest_packs`, with exactly `count` packs; None if the rule leaves an item without a pack, or a pack without
        an item.
    """
    _check(lengths, capacity)
    packs: list[list[int]] = [[] for _ in range(count)]
    rooms = [capacity] * count
    queue = [(0.0, pack) for pack in range(count)]
    for item in sorted(range(len(lengths)), key=lambda item: (-costs[item], item)):
        full = []
        while queue and rooms[queue[0][1]] < lengths[item]:
            full.append(heapq.heappop(queue))
        if not queue:
            return None
        cost, pack = heapq.heappop(queue)
        packs[pack].append(item)
        rooms[pack] -= lengths[item]
        for entry in (*full, (cost + costs[item], pack)):
            heapq.heappush(queue, entry)
    return sorted(sorted(pack) for pack in packs) if all(packs) else None


def rows_of_similar_width(
    widths: Sequence[int],
    rows: Sequence[int],
    capacity: int,
    cost: Callable[[int], float] = float,
    limit: float = math.inf,
) -> list[list[int]]:
    """Packs whose rows are all padded to the widest one: the widest item first, as many together as fit.

    Args:
        widths: of each item's rows, in tokens.
        rows: number of rows of each item.
        capacity: of a pack, in tokens: its rows times its width.
        cost: of a row of a width, in any unit.
        limit: largest cost of a pack of several items.

    Returns:
        The indices of each pack's items, ascending; the packs of wider items first.

    Raises:
        DataError: an item is larger than a pack.
    """
    _check([width * count for width, count in zip(widths, rows, strict=True)], capacity)
    packs: list[list[int]] = []
    height = width = 0
    for item in sorted(range(len(widths)), key=lambda item: (-widths[item], item)):
        taller = height + rows[item]
        if not packs or taller * width > capacity or taller * cost(width) > limit:
            packs.append([])
            taller, width = rows[item], widths[item]
        packs[-1].append(item)
        height = taller
    return [sorted(pack) for pack in packs]


def even_rows(
    widths: Sequence[int], rows: Sequence[int], capacity: int, count: int, cost: Callable[[int], float]
) -> list[list[int]]:
    """`rows_of_similar_width` in at most `count` packs, with the smallest `limit` that takes no more of them, found by
    bisection, so that their costs are about equal. `capacity` must allow `count` packs."""
    packs = rows_of_similar_width(widths, rows, capacity)
    low, high = 0.0, max(sum(rows[item] for item in pack) * cost(max(widths[item] for item in pack)) for pack in packs)
    for _ in range(30):
        limit = (low + high) / 2
        found = rows_of_similar_width(widths, rows, capacity, cost, limit)
        if len(found) <= count:
            packs, high = found, limit
        else:
            low = limit
    return packs


def split_packs(packs: Sequence[Sequence[int]], costs: Sequence[float], count: int) -> list[list[int]]:
    """Split the most expensive packs of several items until there are `count`; fewer if every pack has one item."""
    made = [list(pack) for pack in packs]
    while len(made) < count:
        made.sort(key=lambda pack: (len(pack) > 1, sum(costs[item] for item in pack)))
        if not made or len(made[-1]) < 2:
            break
        whole = made.pop()
        halves: tuple[list[int], list[int]] = ([], [])
        totals = [0.0, 0.0]
        for item in sorted(whole, key=lambda item: (-costs[item], item)):
            cheaper = totals.index(min(totals))
            halves[cheaper].append(item)
            totals[cheaper] += costs[item]
        made += halves
    return sorted(sorted(pack) for pack in made)


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
        place = bisect_left(by_cost, costs[item] - difference / 2, key=lambda other: costs[other])
        for other in by_cost[max(0, place - 1) : place + 1]:
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
        raise DataError(f"an item of {longest} tokens does not fit into a pack of {capacity}; make packs larger")
