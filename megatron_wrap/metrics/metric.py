"""Metric types and their reduction: sums over micro-batches and ranks, in one all-reduce."""

from __future__ import annotations

from collections.abc import Mapping
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


Metric: TypeAlias = Number | tuple[Number, Number] | Total
"""A pair (sum, weight) is reported as the ratio of the two sums over micro-batches, DP and CP ranks; a scalar as the
mean weighted by the loss weight of each micro-batch; a `Total` as a sum."""


class MetricSums:
    """Sums one rank's metrics over the micro-batches of a step, without a device synchronization."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor | None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names added so far, sorted, as `vector` expects them."""
        return tuple(sorted(self._sums))

    def add(self, metrics: Mapping[str, Metric], weight: float) -> None:
        """Add one micro-batch's metrics; `weight` applies to its scalars.

        Raises:
            FlowError: a metric is not a number, or changes its type between micro-batches.
        """
        for name, metric in metrics.items():
            if isinstance(metric, Total):
                value, added = self._number(name, metric.value), None
            elif isinstance(metric, tuple):
                value, added = self._number(name, metric[0]), self._number(name, metric[1])
            else:
                added = torch.full((), weight, dtype=torch.float64, device=self._device)  # a copy would synchronize
                value = self._number(name, metric) * added
            if name not in self._sums:
                self._sums[name], self._weights[name] = value, added
                continue
            previous = self._weights[name]
            if (previous is None) != (added is None):
                raise FlowError(f"metric {name!r} is a Total in one micro-batch and not in another; use one type")
            self._sums[name] = self._sums[name] + value
            self._weights[name] = None if added is None or previous is None else previous + added

    def vector(self, names: tuple[str, ...]) -> list[Tensor]:
        """Sum and weight of each name (weight 0 for a Total); zeros for a name that this rank does not have."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        numbers = []
        for name in names:
            weight = self._weights.get(name)
            numbers += [self._sums.get(name, zero), zero if weight is None else weight]
        return numbers

    def totals(self) -> frozenset[str]:
        """Names of metrics that are summed, not averaged."""
        return frozenset(name for name, weight in self._weights.items() if weight is None)

    def _number(self, name: str, value: Number) -> Tensor:
        tensor = torch.as_tensor(value).detach()
        if tensor.numel() != 1:
            raise FlowError(
                f"metric {name!r} has shape {tuple(tensor.shape)}; return a scalar, a pair (sum, weight) of scalars or "
                "a Total"
            )
        return tensor.reshape(()).to(device=self._device, dtype=torch.float64, non_blocking=True)


def read_reduced(names: tuple[str, ...], totals: frozenset[str], reduced: list[float]) -> dict[str, float | None]:
    """Metrics from `MetricSums.vector` after its sum over ranks; None if the weight is 0."""
    values: dict[str, float | None] = {}
    for index, name in enumerate(names):
        total, weight = reduced[2 * index], reduced[2 * index + 1]
        values[name] = total if name in totals else total / weight if weight else None
    return values
