"""From each rank's sums to metrics that every rank knows, in one collective over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_wrap.engine.loss import take_objective
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.metrics.metric import MetricSums, read_reduced
from megatron_wrap.parallel.collectives import gather_objects, reduce_in_place
from megatron_wrap.parallel.state import ParallelState


@dataclass(frozen=True)
class ReducedMetrics:
    """A step's or an evaluation's numbers, the same on every rank."""

    loss: float
    """The objective; nan where nothing had weight."""
    flow_metrics: dict[str, float]
    sums: dict[str, float]
    """The engine's own numbers, summed over all ranks."""


@dataclass(frozen=True)
class _Names:
    """What one kind of step reports, known to every rank."""

    names: tuple[str, ...] = ()
    totals: frozenset[str] = frozenset()
    """Those that are summed, not averaged."""


class MetricReduction:
    """Sums over ranks. Which metrics a flow reports only the last pipeline stage sees; all ranks agree on the names in
    the first step of each kind.

    Args:
        flow: its metrics and its loss coefficients are meant.
    """

    def __init__(self, flow: MegatronWrapTrainingFlowBase, parallel: ParallelState, device: torch.device) -> None:
        self._flow = flow
        self._parallel = parallel
        self._device = device
        self._known: dict[str, _Names] = {}

    def reduce(
        self, sums: MetricSums, kind: str, of_all_ranks: Mapping[str, Tensor] = MappingProxyType({})
    ) -> ReducedMetrics:
        """Sum over ranks, and wait for the result. Collective.

        Args:
            sums: of the flow's metrics; only those of the last pipeline stage's tensor-parallel rank 0 are added.
            kind: "train" or "evaluate(NAME)".
            of_all_ranks: further numbers, to which each rank has a part to add; the same names on all ranks.

        Raises:
            FlowError: a rank reports other metrics than in its first step.
        """
        known = self._names(sums, kind)
        mine = sums if self._parallel.counts_once else MetricSums(self._device)
        numbers = mine.vector(known.names)
        first = len(numbers)
        numbers += of_all_ranks.values()
        reduced: list[float] = []
        if numbers:  # on all ranks alike
            vector = torch.stack([number.double() for number in numbers])
            reduce_in_place(vector, "sum", self._parallel.world.group)
            reduced = vector.tolist()
        values = read_reduced(known.names, known.totals, reduced[:first])
        loss = take_objective(values, self._flow.get_loss_coefficients())
        values.pop("loss", None)  # older flows report the loss among their metrics; the objective stands for it
        return ReducedMetrics(
            loss=loss,
            flow_metrics={name: math.nan if value is None else value for name, value in values.items()},
            sums=dict(zip(of_all_ranks, reduced[first:], strict=True)),
        )

    def _names(self, sums: MetricSums, kind: str) -> _Names:
        mine = sums.names
        if kind not in self._known:
            if not any(gather_objects(bool(mine))):  # a step without weight: nothing to agree on yet
                return _Names()
            everywhere = gather_objects((mine, sums.totals()))
            names = sorted({name for of_rank, _ in everywhere for name in of_rank})
            totals = frozenset(name for _, of_rank in everywhere for name in of_rank)
            self._known[kind] = _Names(tuple(names), totals)
        known = self._known[kind]
        new = set(mine) - set(known.names)
        if new:
            raise FlowError(
                f"{type(self._flow).__name__}: metrics {sorted(new)} were not there in the first step; report the same "
                "names in every micro-batch"
            )
        return known
