"""Metric types and their reduction over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_wrap.errors import FlowError

Number: TypeAlias = Tensor | float | int


@dataclass(frozen=True)
class Total:
    """A metric that is summed over micro-batches, data-parallel and context-parallel ranks; `value` is local."""

    value: Number


@dataclass(frozen=True)
class Minimum:
    """The smallest `value` of all micro-batches and ranks; inf where a micro-batch has none."""

    value: Number


@dataclass(frozen=True)
class Maximum:
    """The largest `value` of all micro-batches and ranks; -inf where a micro-batch has none."""

    value: Number


@dataclass(frozen=True)
class Difference:
    """The difference of two means, each a pair (sum, weight) as a metric of its own; without a value where one of the
    weights of the step is 0."""

    first: tuple[Number, Number]
    second: tuple[Number, Number]


Metric: TypeAlias = Number | tuple[Number, Number] | Total | Minimum | Maximum | Difference
"""A pair (sum, weight) is reported as the ratio of the two sums over micro-batches, DP and CP ranks; a scalar as the
mean weighted by the loss weight of each micro-batch; the others as their classes describe."""

SUMMANDS: Mapping[str, int] = {"mean": 2, "Total": 1, "Difference": 4, "Minimum": 0, "Maximum": 0}
"""Kind of a metric -> how many of its numbers are summed over ranks; an extreme has one number, which is not summed."""


class MetricSums:
    """Reduces one rank's metrics over the micro-batches of a step, without a device synchronization."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: dict[str, list[Tensor]] = {}
        self.kinds: dict[str, str] = {}
        """Name of each metric added so far -> its kind, one of SUMMANDS."""

    def add(self, metrics: Mapping[str, Metric], weight: float) -> None:
        """Add one micro-batch's metrics; `weight` applies to its scalars.

        Raises:
            FlowError: a metric is not a number, or changes its type between micro-batches.
        """
        for name, metric in metrics.items():
            kind, numbers = self._parts(name, metric, weight)
            known = self.kinds.setdefault(name, kind)
            if known != kind:
                raise FlowError(
                    f"metric {name!r} is a {known} in one micro-batch and a {kind} in another; use one type"
                )
            previous = self._numbers.get(name)
            if previous is not None:
                join = torch.maximum if SUMMANDS[kind] == 0 else torch.add
                numbers = [join(earlier, new) for earlier, new in zip(previous, numbers, strict=True)]
            self._numbers[name] = numbers

    def summands(self, kinds: Mapping[str, str]) -> list[Tensor]:
        """The numbers to sum over ranks, for the metrics of `kinds` in their order; zeros for a metric that this rank
        does not have."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        missing = {name: [zero] * SUMMANDS[kind] for name, kind in kinds.items() if SUMMANDS[kind]}
        return [number for name, zeros in missing.items() for number in self._numbers.get(name, zeros)]

    def extremes(self, kinds: Mapping[str, str]) -> list[Tensor]:
        """The numbers whose maximum over ranks is taken, for the extremes of `kinds` in their order: a Minimum negated,
        -inf for a metric that this rank does not have."""
        none = [torch.full((), -math.inf, dtype=torch.float64, device=self._device)]
        names = (name for name, kind in kinds.items() if SUMMANDS[kind] == 0)
        return [number for name in names for number in self._numbers.get(name, none)]

    def _parts(self, name: str, metric: Metric, weight: float) -> tuple[str, list[Tensor]]:
        """Kind and numbers of one micro-batch's metric."""
        if isinstance(metric, Total):
            return "Total", [self._number(name, metric.value)]
        if isinstance(metric, Minimum):
            return "Minimum", [-self._number(name, metric.value)]
        if isinstance(metric, Maximum):
            return "Maximum", [self._number(name, metric.value)]
        if isinstance(metric, Difference):
            return "Difference", [self._number(name, value) for value in (*metric.first, *metric.second)]
        if isinstance(metric, tuple):
            return "mean", [self._number(name, metric[0]), self._number(name, metric[1])]
        added = torch.full((), weight, dtype=torch.float64, device=self._device)  # a copy would synchronize
        return "mean", [self._number(name, metric) * added, added]

    def _number(self, name: str, value: Number) -> Tensor:
        tensor = torch.as_tensor(value).detach()
        if tensor.numel() != 1:
            raise FlowError(
                f"metric {name!r} has shape {tuple(tensor.shape)}; return a scalar, a pair (sum, weight) of scalars, a "
                "Total, Minimum, Maximum or Difference"
            )
        return tensor.reshape(()).to(device=self._device, dtype=torch.float64, non_blocking=True)


def read_reduced(
    kinds: Mapping[str, str], summed: Sequence[float], largest: Sequence[float] = ()
) -> dict[str, float | None]:
    """Metrics from `MetricSums.summands` after their sum over ranks and `MetricSums.extremes` after their maximum; None
    if a weight is 0, or no rank has a value of an extreme."""
    values: dict[str, float | None] = {}
    sums, extremes = iter(summed), iter(largest)
    for name, kind in kinds.items():
        if SUMMANDS[kind] == 0:
            value = next(extremes)
            values[name] = None if value == -math.inf else -value if kind == "Minimum" else value
            continue
        numbers = [next(sums) for _ in range(SUMMANDS[kind])]
        means = [total / weight if weight else None for total, weight in zip(numbers[::2], numbers[1::2], strict=False)]
        if kind == "Difference":
            first, second = means
            values[name] = None if first is None or second is None else first - second
        else:
            values[name] = numbers[0] if kind == "Total" else means[0]
    return values
