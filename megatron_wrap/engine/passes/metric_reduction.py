"""Reduction of each rank's metrics over all ranks: one all-reduce, and one more if a flow reports extremes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_wrap.engine.passes.loss import OBJECTIVE, loss_coefficients, take_objective
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.metrics.metric import SUMMANDS, MetricSums, read_reduced
from megatron_wrap.parallel.collectives import gather_objects, reduce_in_place
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base.read_on_host import start_host_copy


@dataclass(frozen=True)
class ReducedMetrics:
    """Metrics of a step or an evaluation, the same on every rank."""

    loss: float
    """The objective; nan if all weights are 0."""
    flow_metrics: dict[str, float]
    sums: dict[str, float]
    """Further values of the engine, such as router losses, summed over all ranks."""
    copied: tuple[float, ...] = ()
    """Values of the tensors that were copied to the host without a reduction."""


class StartedReduction:
    """A reduction that is queued on the device, followed by the copy of its result to the host.

    Args:
        vector: fp64; the numbers of the metrics, of `values`, and of what is only copied, after their reduction.
        known: name of each metric and its kind.
        values: names of the further values.
        coefficients: of the loss terms.
        host_waits: set when the host waits.
    """

    def __init__(
        self,
        vector: Tensor,
        known: Mapping[str, str],
        values: Sequence[str],
        coefficients: Mapping[str, float],
        host_waits: threading.Event,
    ) -> None:
        self._vector, self._known, self._values, self._coefficients = vector, known, values, coefficients
        self._host_waits, self._wait = host_waits, start_host_copy(vector)

    def loss_is_finite(self) -> Tensor:
        """Whether the objective will be a finite number, bool with one element on the device."""
        terms = sum(name.startswith(OBJECTIVE) for name in self._known)  # pairs, one after the other: names are sorted
        begin = sum(SUMMANDS[kind] for name, kind in self._known.items() if name < OBJECTIVE)
        sums, weights = self._vector[begin:][: 2 * terms].view(-1, 2).unbind(1)
        counted = weights != 0
        is_finite = ((sums / weights).isfinite() | ~counted).all() & counted.any()
        return is_finite if all(map(math.isfinite, self._coefficients.values())) else torch.zeros_like(is_finite)

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> ReducedMetrics:
        """Wait for the device.

        Args:
            meanwhile: called when the host would begin to wait.
        """
        self._host_waits.set()
        meanwhile()
        read: list[float] = self._wait().tolist()
        first = sum(SUMMANDS[kind] for kind in self._known.values())
        summed = first + len(self._values)
        after = summed + sum(1 for kind in self._known.values() if SUMMANDS[kind] == 0)
        values = read_reduced(self._known, read[:first], read[summed:after])
        loss = take_objective(values, self._coefficients)
        values.pop("loss", None)  # older flows report the loss among their metrics; the objective replaces it
        return ReducedMetrics(
            loss=loss,
            flow_metrics={name: math.nan if value is None else value for name, value in values.items()},
            sums=dict(zip(self._values, read[first:summed], strict=True)),
            copied=tuple(read[after:]),
        )


class MetricReduction:
    """Sums metrics over ranks. All ranks exchange the names of the metrics in the first step of each kind, because only
    the last pipeline stage knows them.

    Args:
        flow: reports the metrics and defines the loss coefficients.
    """

    def __init__(self, flow: MegatronWrapTrainingFlowBase, parallel: ParallelState, device: torch.device) -> None:
        self._flow = flow
        self._parallel = parallel
        self._device = device
        self._known: dict[str, dict[str, str]] = {}
        """Kind of step -> name of each metric, sorted, and its kind."""
        self.host_waits = threading.Event()
        """Event that is set when this process has queued all work of a step and waits for the device. Other threads
        should work then: earlier they would hold Python's lock, which the queueing needs."""

    def start(
        self,
        sums: MetricSums,
        kind: str,
        local_values: Mapping[str, Tensor] = MappingProxyType({}),
        copied: Sequence[Tensor] = (),
    ) -> StartedReduction:
        """Queue the reduction over ranks and the copy of its result to the host. The host waits for it in `finish` of
        the result, the only wait in a step. Collective.

        Args:
            sums: of the flow's metrics; only those of the last pipeline stage's tensor-parallel rank 0 are added.
            kind: "train" or "evaluate(NAME)".
            local_values: further values, of which each rank holds one summand; the same names on all ranks.
            copied: tensors of one element on the device whose values this rank needs at the same time.

        Raises:
            FlowError: a rank reports a metric that it did not report in its first step of this kind.
        """
        known = self._metric_kinds(sums, kind)
        local = sums if self._parallel.counts_once else MetricSums(self._device)
        numbers, extremes = local.summands(known), local.extremes(known)
        numbers += local_values.values()
        everything = (*numbers, *extremes, *copied)
        vector = torch.zeros(0, dtype=torch.float64, device=self._device)
        if everything:
            vector = torch.stack([number.double().reshape(()) for number in everything])
        if numbers:  # the same conditions on all ranks
            reduce_in_place(vector[: len(numbers)], "sum", self._parallel.world.group)
        if extremes:
            reduce_in_place(vector[len(numbers) :][: len(extremes)], "max", self._parallel.world.group)
        return StartedReduction(vector, known, tuple(local_values), loss_coefficients(self._flow), self.host_waits)

    def _metric_kinds(self, sums: MetricSums, kind: str) -> dict[str, str]:
        if kind not in self._known:
            everywhere: dict[str, str] = {}
            for of_rank in gather_objects(sums.kinds):
                everywhere |= of_rank
            self._known[kind] = dict(sorted(everywhere.items()))
        known = self._known[kind]
        new = sums.kinds.keys() - known.keys()
        if new:
            raise FlowError(
                f"{type(self._flow).__name__}: metrics {sorted(new)} were not reported in the first step; report the "
                "same names in every micro-batch"
            )
        return known
