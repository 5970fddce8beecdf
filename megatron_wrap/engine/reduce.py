"""From each rank's sums to metrics that every rank knows, in one collective over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_wrap.engine.loss import objective
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.errors import FlowError
from megatron_wrap.metrics.metric import MetricSums, read_reduced
from megatron_wrap.parallel.collectives import gather_objects, reduce_in_place


@dataclass(frozen=True)
class ReducedMetrics:
    """A step's or an evaluation's numbers, the same on every rank."""

    loss: float
    """The objective; nan where nothing had weight."""
    flow_metrics: dict[str, float]
    sums: dict[str, float]
    """The engine's own numbers, summed over all ranks."""


def reduce_metrics(
    state: TrainingState, sums: MetricSums, kind: str, of_all_ranks: Mapping[str, Tensor] = MappingProxyType({})
) -> ReducedMetrics:
    """Sum over ranks; of the flow's metrics only the last pipeline stage's tensor-parallel rank 0 has sums to add.

    Args:
        kind: "train" or "evaluate NAME"; the names of its metrics are agreed on at its first call.
        of_all_ranks: further numbers, to which each rank has a part to add; the same names on all ranks.

    Raises:
        FlowError: a rank reports other metrics than in its first step.
    """
    names, totals = _agreed_names(state, sums, kind)
    mine = sums if state.parallel.counts_once else MetricSums(state.platform.device)
    numbers = mine.vector(names)
    first = len(numbers)
    numbers += of_all_ranks.values()
    reduced: list[float] = []
    if numbers:  # on all ranks alike
        vector = torch.stack([number.double() for number in numbers])
        reduce_in_place(vector, "sum", state.parallel.world.group)
        reduced = vector.tolist()
    values = read_reduced(names, totals, reduced[:first])
    loss = objective(values, state.flow.get_loss_coefficients())
    values.pop("loss", None)  # older flows report the loss among their metrics; the objective stands for it
    return ReducedMetrics(
        loss=loss,
        flow_metrics={name: math.nan if value is None else value for name, value in values.items()},
        sums=dict(zip(of_all_ranks, reduced[first:], strict=True)),
    )


def _agreed_names(state: TrainingState, sums: MetricSums, kind: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of the metrics and those that are sums, which only the last stage sees, known to every rank."""
    mine = sums.names
    if kind not in state.agreed:
        if not any(gather_objects(bool(mine))):  # a step without weight: nothing to agree on yet
            return (), frozenset()
        told = gather_objects((mine, sums.totals()))
        names = sorted({name for of_rank, _ in told for name in of_rank})
        totals = frozenset(name for _, of_rank in told for name in of_rank)
        state.agreed[kind] = (tuple(names), totals)
    names, totals = state.agreed[kind]
    new = set(mine) - set(names)
    if new:
        raise FlowError(
            f"{type(state.flow).__name__}: metrics {sorted(new)} were not there in the first step; report the same "
            "names in every micro-batch"
        )
    return names, totals
