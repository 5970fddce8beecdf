"""Reduction of each rank's metrics over all ranks: one all-reduce, and one more if a flow reports extremes."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_wrap.engine.passes.loss import loss_coefficients, take_objective
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.metrics.metric import MetricSums, read_reduced
from megatron_wrap.parallel.collectives import gather_objects, reduce_in_place
from megatron_wrap.parallel.state import ParallelState


@dataclass(frozen=True)
class ReducedMetrics:
    """Metrics of a step or an evaluation, the same on every rank."""

    loss: float
    """The objective; nan if all weights are 0."""
    flow_metrics: dict[str, float]
    sums: dict[str, float]
    """Further values of the engine, such as router losses, summed over all ranks."""
    copied: tuple[float, ...] = ()
    """Values of the tensors that were only copied to the host."""


class MetricReduction:
    """Sums metrics over ranks. Only the last pipeline stage knows which metrics the flow reports, so all ranks exchange
    the names in the first step of each kind.

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
        """Set when this process has queued all work of a step and waits for the device: work in other threads then
        delays nothing that is to be queued, which would need Python's lock."""

    def reduce(
        self,
        sums: MetricSums,
        kind: str,
        local_values: Mapping[str, Tensor] = MappingProxyType({}),
        copied: Sequence[Tensor] = (),
    ) -> ReducedMetrics:
        """Reduce over ranks and copy the result to the host, the only time in a step that the host waits for the
        device. Collective.

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
        first = len(numbers)
        numbers += local_values.values()
        read = self._read(numbers, extremes, copied)
        after = len(numbers) + len(extremes)
        values = read_reduced(known, read[:first], read[len(numbers) : after])
        loss = take_objective(values, loss_coefficients(self._flow))
        values.pop("loss", None)  # older flows report the loss among their metrics; the objective replaces it
        return ReducedMetrics(
            loss=loss,
            flow_metrics={name: math.nan if value is None else value for name, value in values.items()},
            sums=dict(zip(local_values, read[first : len(numbers)], strict=True)),
            copied=tuple(read[after:]),
        )

    def _read(self, numbers: list[Tensor], extremes: list[Tensor], copied: Sequence[Tensor]) -> list[float]:
        """The sums of `numbers` over ranks, the maxima of `extremes`, and `copied`, in one copy to the host."""
        everything = (*numbers, *extremes, *copied)
        if not everything:
            return []
        vector = torch.stack([number.double().reshape(()) for number in everything])
        last = len(numbers) + len(extremes)
        if numbers:  # the same conditions on all ranks
            reduce_in_place(vector[: len(numbers)], "sum", self._parallel.world.group)
        if extremes:
            reduce_in_place(vector[len(numbers) : last], "max", self._parallel.world.group)
        self.host_waits.set()
        read: list[float] = vector.tolist()
        return read

    def _metric_kinds(self, sums: MetricSums, kind: str) -> dict[str, str]:
        if kind not in self._known:
            if not any(gather_objects(bool(sums.kinds))):  # a skipped step: no rank has called the loss function yet
                return {}
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
