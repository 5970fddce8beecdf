"""What a flow's `calculate_loss` is seen to do on each rank, and what must not differ between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_wrap.errors import FlowError
from megatron_wrap.metrics.metric import Total
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.state import ParallelState

SAME_METRIC = 1e-4
"""Largest relative difference of two ranks' values that count as one."""


@dataclass(frozen=True)
class Seen:
    """What all ranks' calls of `calculate_loss` have shown; the same on every rank."""

    two_values: bool
    """The flow returns (loss, metrics), a mean over the micro-batch."""
    draws_random: bool
    """It draws random numbers, which each layout draws in another order."""
    metric_kinds: dict[str, str] = field(default_factory=dict)
    """Metric -> "number", "pair" or "total"."""
    over_tp: dict[str, str] = field(default_factory=dict)
    """Metric -> two values, where tensor-parallel ranks report different ones."""
    over_cp: dict[str, str] = field(default_factory=dict)
    """The same for bare numbers of context-parallel ranks; a pair and a total are meant to differ."""


@dataclass
class Observer:
    """Stands before a flow's `calculate_loss` on one rank and keeps what it returned."""

    noise: float = 0.0
    """Relative size of what is added to the model's outputs, to see what rounding does to the flow's numbers."""
    two_values: bool = False
    draws_random: bool = False
    calls: list[dict[str, tuple[str, float, float]]] = field(default_factory=list)
    """Of each call: metric -> (kind, value, weight)."""

    def watch(self, flow: Any) -> None:
        """Put the observer into this flow object."""
        calculate_loss = flow.calculate_loss

        generator = torch.Generator().manual_seed(0)

        def observed(loss_inputs: Any, model_forward_output: torch.Tensor) -> Any:
            if self.noise:
                noise = torch.randn(model_forward_output.shape, generator=generator).to(model_forward_output)
                model_forward_output = model_forward_output * (1 + self.noise * noise)
            before = _random_state(model_forward_output.device)
            returned = calculate_loss(loss_inputs, model_forward_output)
            self.draws_random |= not torch.equal(before, _random_state(model_forward_output.device))
            self.two_values |= isinstance(returned, tuple)
            metrics = returned[1] if isinstance(returned, tuple) else getattr(returned, "metrics", {})
            self.calls.append({name: _read(metric) for name, metric in metrics.items()})
            return returned

        flow.calculate_loss = observed

    def seen(self, flow: Any, parallel: ParallelState) -> Seen:
        """What the ranks together have shown. Collective.

        Raises:
            FlowError: the names of the metrics are not the same in each micro-batch and on each rank.
        """
        place = (parallel.dp.rank, parallel.cp.rank, parallel.tp.rank)
        told = gather_objects((place, self.calls, self.two_values, self.draws_random))
        ranks = {place: calls for place, calls, _, _ in told if calls}
        _refuse_other_names(type(flow).__name__, ranks)
        names: dict[str, tuple[str, float, float]] = next((calls[0] for calls in ranks.values()), {})
        over_tp = _differences(((dp, cp), calls) for (dp, cp, _), calls in ranks.items())
        over_cp = _differences(((dp, tp), _bare(calls)) for (dp, _, tp), calls in ranks.items())
        return Seen(
            two_values=any(two for _, _, two, _ in told),
            draws_random=any(random for _, _, _, random in told),
            metric_kinds={name: kind for name, (kind, _, _) in names.items()},
            over_tp=over_tp,
            over_cp=over_cp,
        )


Calls = list[dict[str, tuple[str, float, float]]]


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _read(metric: Any) -> tuple[str, float, float]:
    if isinstance(metric, Total):
        return "total", _number(metric.value), 0.0
    if isinstance(metric, tuple):
        return "pair", _number(metric[0]), _number(metric[1])
    return "number", _number(metric), 0.0


def _number(value: Any) -> float:
    tensor = torch.as_tensor(value).detach()
    return float(tensor) if tensor.numel() == 1 else math.nan  # the engine refuses it with words


def _bare(calls: Calls) -> Calls:
    return [{name: seen for name, seen in call.items() if seen[0] == "number"} for call in calls]


def _refuse_other_names(flow: str, ranks: Mapping[tuple[int, ...], Calls]) -> None:
    names = [sorted(call) for calls in ranks.values() for call in calls]
    other = next((found for found in names if found != names[0]), None)
    if other is not None:
        raise FlowError(
            f"{flow}.calculate_loss reports the metrics {names[0]} in one micro-batch and {other} in another; report "
            "the same names in every one, as a pair (0, 0) where there is nothing"
        )


def _differences(groups: Iterable[tuple[Any, Calls]]) -> dict[str, str]:
    """Metric -> two values, of the first ranks of one group that report different ones for one micro-batch."""
    first: dict[Any, Calls] = {}
    found: dict[str, str] = {}
    for group, calls in groups:
        for mine, theirs in zip(calls, first.setdefault(group, calls), strict=False):
            for name, (_, value, weight) in mine.items():
                _, other, other_weight = theirs[name]
                if not (_same(value, other) and _same(weight, other_weight)):
                    found.setdefault(name, f"{other:.4g} and {value:.4g}")
    return found


def _same(value: float, other: float) -> bool:
    if math.isnan(value) or math.isnan(other):
        return math.isnan(value) and math.isnan(other)
    return abs(value - other) <= SAME_METRIC * max(abs(value), abs(other), 1e-6)
