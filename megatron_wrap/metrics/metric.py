"""What a metric is and the one way metrics are reduced: sums over micro-batches and ranks, in one collective."""

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
    """A metric that is summed over micro-batches, data-parallel and context-parallel ranks: this rank's share."""

    value: Number


Metric: TypeAlias = Number | tuple[Number, Number] | Total
"""A pair (sum, weight) is reported as the ratio of the two sums over micro-batches, DP and CP; a bare scalar as the
mean of its values, weighted by its micro-batch's loss weight; a `Total` as a sum."""


class MetricSums:
    """Adds up one rank's metrics over the micro-batches of a step, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor | None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names seen so far, sorted: the order of `vector`."""
        return tuple(sorted(self._sums))

    def add(self, metrics: Mapping[str, Metric], weight: float) -> None:
        """Add one micro-batch's metrics; `weight` is that of its bare scalars.

        Raises:
            FlowError: a metric is not a number, or changes its kind between micro-batches.
        """
        for name, metric in metrics.items():
            if isinstance(metric, Total):
                value, mass = self._number(name, metric.value), None
            elif isinstance(metric, tuple):
                value, mass = self._number(name, metric[0]), self._number(name, metric[1])
            else:
                mass = torch.tensor(weight, dtype=torch.float64, device=self._device)
                value = self._number(name, metric) * mass
            if name not in self._sums:
                self._sums[name], self._weights[name] = value, mass
                continue
            known = self._weights[name]
            if (known is None) != (mass is None):
                raise FlowError(f"metric {name!r} is a Total in one micro-batch and not in another; give one kind")
            self._sums[name] = self._sums[name] + value
            self._weights[name] = None if mass is None or known is None else known + mass

    def vector(self, names: tuple[str, ...]) -> list[Tensor]:
        """For each name its sum and its weight (0 for a Total), zeros for a name that this rank has not seen."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        numbers = []
        for name in names:
            weight = self._weights.get(name)
            numbers += [self._sums.get(name, zero), zero if weight is None else weight]
        return numbers

    def totals(self) -> frozenset[str]:
        """Names of the metrics that are summed, not averaged."""
        return frozenset(name for name, weight in self._weights.items() if weight is None)

    def _number(self, name: str, value: Number) -> Tensor:
        tensor = torch.as_tensor(value).detach()
        if tensor.numel() != 1:
            raise FlowError(
                f"metric {name!r} has shape {tuple(tensor.shape)}; give a scalar, a pair (sum, weight) of scalars or "
                "a Total"
            )
        return tensor.reshape(()).to(device=self._device, dtype=torch.float64, non_blocking=True)


def read_reduced(names: tuple[str, ...], totals: frozenset[str], reduced: list[float]) -> dict[str, float | None]:
    """Metrics from the vector of `MetricSums.vector` after its sum over ranks; None where a weight is 0."""
    values: dict[str, float | None] = {}
    for place, name in enumerate(names):
        total, weight = reduced[2 * place], reduced[2 * place + 1]
        values[name] = total if name in totals else total / weight if weight else None
    return values
