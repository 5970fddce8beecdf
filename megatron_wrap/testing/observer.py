"""Records what a flow's `calculate_loss` returns on each rank, and compares the ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_wrap.engine.passes.loss import CalculateLoss
from megatron_wrap.errors import FlowError, MegatronWrapError
from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.metrics.metric import Difference, Maximum, Minimum, Total
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.testing.vocabulary_calls import VocabularyCalls, raised_at

SAME_METRIC = 1e-4
"""Largest relative difference of two ranks' values that count as equal."""


@dataclass(frozen=True)
class Seen:
    """Observations from all ranks' calls of `calculate_loss`; the same on every rank."""

    two_values: bool
    """Whether the flow returns (loss, metrics), where the loss is a mean over the micro-batch."""
    draws_random: bool
    """Whether the flow draws random numbers, which differ between layouts."""
    metric_kinds: dict[str, str] = field(default_factory=dict)
    """Metric -> "number", "pair" (also of a Difference), "total" or "extreme"."""
    over_tp: dict[str, str] = field(default_factory=dict)
    """Metric -> two different values that tensor-parallel ranks report."""
    over_cp: dict[str, str] = field(default_factory=dict)
    """Metric -> two different values that context-parallel ranks report as bare numbers; pairs and totals may
    differ."""
    vocabulary_calls: str = ""
    """Calls of torch functions over the vocabulary, which see one tensor-parallel rank's columns; empty if none."""


@dataclass
class Observer:
    """Records the metrics that a flow's `calculate_loss` returns on one rank."""

    noise: float = 0.0
    """Relative size of the noise that is added to the model's outputs, to measure the effect of rounding."""
    two_values: bool = False
    draws_random: bool = False
    calls: list[dict[str, tuple[str, float, float]]] = field(default_factory=list)
    """Metric -> (kind, value, weight), for each call."""
    vocabulary: VocabularyCalls = field(default_factory=VocabularyCalls)
    error: Exception | None = None
    """The error that `calculate_loss` raised; None: it raised none."""

    def around(self, calculate_loss: CalculateLoss) -> CalculateLoss:
        """A function that calls `calculate_loss` and records what it returns."""
        generator = torch.Generator().manual_seed(0)

        def observed(loss_inputs: Any, model_forward_output: torch.Tensor) -> Any:
            if self.noise:
                noise = torch.randn(model_forward_output.shape, generator=generator).to(model_forward_output)
                model_forward_output = model_forward_output * (1 + self.noise * noise)
            before = _random_state(model_forward_output.device)
            self.vocabulary.columns = model_forward_output.shape[-1]
            try:
                with self.vocabulary:
                    returned = calculate_loss(loss_inputs, model_forward_output)
            except Exception as error:
                self.error = error
                raise
            self.draws_random |= not torch.equal(before, _random_state(model_forward_output.device))
            self.two_values |= isinstance(returned, tuple)
            others = returned.metrics if isinstance(returned, LossOutput) else {}
            metrics = returned[1] if isinstance(returned, tuple) else others
            self.calls.append({name: _read(metric) for name, metric in metrics.items()})
            return returned

        return observed

    @contextlib.contextmanager
    def reported(self, flow: Any, parallel: ParallelState) -> Iterator[None]:
        """Convert an error that `calculate_loss` raises inside the block, on the ranks that run it.

        Raises:
            FlowError: with the line of the flow, and with its likely cause under tensor parallelism.
        """
        try:
            yield
        except MegatronWrapError:
            raise
        except Exception as error:
            if error is not self.error:
                raise
            text = f"{type(flow).__name__}.calculate_loss raised {type(error).__name__}: {str(error).rstrip('.')}"
            if self.vocabulary.calls and parallel.tp.size > 1:
                raise FlowError(f"{text}; likely cause: {'; '.join(self.vocabulary.calls.values())}") from error
            raise FlowError(f"{text}, at {raised_at(error)}") from error

    def seen(self, flow: Any, parallel: ParallelState) -> Seen:
        """The observations of all ranks. Collective.

        Raises:
            FlowError: the names of the metrics differ between micro-batches or ranks.
        """
        rank = (parallel.dp.rank, parallel.cp.rank, parallel.tp.rank)
        vocabulary_calls = "; ".join(self.vocabulary.calls.values())
        everywhere = gather_objects((rank, self.calls, self.two_values, self.draws_random, vocabulary_calls))
        ranks = {rank: calls for rank, calls, *_ in everywhere if calls}
        _refuse_other_names(type(flow).__name__, ranks)
        names: dict[str, tuple[str, float, float]] = next((calls[0] for calls in ranks.values()), {})
        return Seen(
            two_values=any(two for _, _, two, _, _ in everywhere),
            draws_random=any(random for _, _, _, random, _ in everywhere),
            vocabulary_calls=max(of_rank for *_, of_rank in everywhere),
            metric_kinds={name: kind for name, (kind, _, _) in names.items()},
            over_tp=_differences(((dp, cp), calls) for (dp, cp, _), calls in ranks.items()),
            over_cp=_differences(((dp, tp), _bare(calls)) for (dp, _, tp), calls in ranks.items()),
        )


Calls = list[dict[str, tuple[str, float, float]]]


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _read(metric: Any) -> tuple[str, float, float]:
    if isinstance(metric, Total | Minimum | Maximum):
        return "total" if isinstance(metric, Total) else "extreme", _number(metric.value), 0.0
    if isinstance(metric, Difference):
        metric = (metric.first[0], metric.second[0])
    if isinstance(metric, tuple):
        return "pair", _number(metric[0]), _number(metric[1])
    return "number", _number(metric), 0.0


def _number(value: Any) -> float:
    tensor = torch.as_tensor(value).detach()
    return float(tensor) if tensor.numel() == 1 else math.nan  # the engine raises for it


def _bare(calls: Calls) -> Calls:
    return [{name: seen for name, seen in call.items() if seen[0] == "number"} for call in calls]


def _refuse_other_names(flow: str, ranks: Mapping[tuple[int, ...], Calls]) -> None:
    names = [sorted(call) for calls in ranks.values() for call in calls]
    other = next((names_of_call for names_of_call in names if names_of_call != names[0]), None)
    if other is not None:
        raise FlowError(
            f"{flow}.calculate_loss reports the metrics {names[0]} in one micro-batch and {other} in another; report "
            "the same names in every one, as a pair (0, 0) if there is no value"
        )


def _differences(groups: Iterable[tuple[Any, Calls]]) -> dict[str, str]:
    """Metric -> the first two different values that ranks of the same group report for one micro-batch."""
    first: dict[Any, Calls] = {}
    differences: dict[str, str] = {}
    for group, calls in groups:
        for values, first_values in zip(calls, first.setdefault(group, calls), strict=False):
            for name, (_, value, weight) in values.items():
                _, other, other_weight = first_values[name]
                if not (_same(value, other) and _same(weight, other_weight)):
                    differences.setdefault(name, f"{other:.4g} and {value:.4g}")
    return differences


def _same(value: float, other: float) -> bool:
    if not math.isfinite(value) or not math.isfinite(other):
        return value == other or (math.isnan(value) and math.isnan(other))
    return abs(value - other) <= SAME_METRIC * max(abs(value), abs(other), 1e-6)
