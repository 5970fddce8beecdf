"""State of a run between steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_wrap.config.derived import global_batch_size_at
from megatron_wrap.data.batching import Cursor
from megatron_wrap.engine.prepared import PreparedBatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_wrap.config.schema import RunConfig
    from megatron_wrap.engine.cut import BatchCut
    from megatron_wrap.engine.open_step import OpenStep
    from megatron_wrap.engine.reduce import MetricReduction
    from megatron_wrap.engine.reference import ReferenceModel
    from megatron_wrap.engine.samples import SampleSharing
    from megatron_wrap.engine.schedule import Schedule
    from megatron_wrap.flow import MegatronWrapTrainingFlowBase
    from megatron_wrap.metrics.throughput import ModelShape
    from megatron_wrap.parallel.state import ParallelState
    from megatron_wrap.platform.base import Platform


@dataclass
class BestEvaluation:
    """The best evaluation of `wrap.fit` by `megatron_wrap.checkpoint.best_metric`, saved in a checkpoint; the same on
    every rank."""

    iteration: int | None = None
    """None: there is none yet."""
    value: float | None = None
    """Of the metric."""
    evaluations_since: int = 0
    """Evaluations in a row that were not better."""
    compared_iteration: int | None = None
    """Iteration of the last evaluation that was compared."""

    def compare(self, iteration: int, value: float, largest: bool) -> bool:
        """Compare an evaluation with the best one so far, and record the result.

        An iteration counts once, because a run that resumes from it repeats its evaluation.

        Args:
            iteration: steps taken before the evaluation.
            value: of the metric; one that is not a number is never better.
            largest: the largest value is the best, else the smallest.

        Returns:
            Whether this is the best evaluation.
        """
        if self.compared_iteration == iteration:
            return False
        self.compared_iteration = iteration
        if self.value is None:
            is_better = not math.isnan(value)
        else:
            is_better = value > self.value if largest else value < self.value
        if is_better:
            self.iteration, self.value = iteration, value
        self.evaluations_since = 0 if is_better else self.evaluations_since + 1
        return is_better


@dataclass
class Progress:
    """Counters that are saved in a checkpoint; the same on every rank."""

    iteration: int = 0
    """Steps taken, skipped ones included."""
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Tokens trained on, without padding."""
    skipped_iterations: int = 0
    """Steps without an update: loss-scale overflow, or no loss weight in the whole batch."""
    skipped_samples: int = 0
    """Rows of the data that were left out because they cannot be used."""
    data: dict[str, Any] = field(default_factory=dict)
    """Where the order of samples continues, beyond `consumed_samples`: `Cursor.saved`."""

    def consume(self, batch: Sequence[Any], offered: PreparedBatch | None) -> None:
        """Count the samples of a step.

        Args:
            batch: samples of the step.
            offered: the last batch that `wrap.batches` yielded here; a copy of it counts as it.
        """
        source = batch if isinstance(batch, PreparedBatch) else offered
        before = Cursor.of(self.consumed_samples, self.data)
        if source is not None and source.before == before and len(source) == len(batch):
            self.data = source.after.saved()
            self.skipped_samples += len(source.bad_rows)
        self.consumed_samples += len(batch)


@dataclass
class TrainingState:
    """Everything that a step reads and changes."""

    config: RunConfig
    platform: Platform
    parallel: ParallelState
    flow: MegatronWrapTrainingFlowBase
    transformer_config: TransformerConfig
    chunks: list[Any]
    """This process's model chunks; wrapped in Megatron-Core's DistributedDataParallel if there is an optimizer."""
    optimizer: Any
    """`CheckedOptimizer`; None if the state was built without training."""
    scheduler: Any
    """OptimizerParamScheduler; None if there is no optimizer."""
    shape: ModelShape
    cut: BatchCut
    """How a batch is cut into micro-batches."""
    schedule: Schedule
    """Runs micro-batches through model chunks."""
    sharing: SampleSharing
    """Shares each call's samples with all processes."""
    reduction: MetricReduction
    """Sums metrics over ranks."""
    reference: ReferenceModel | None = None
    """The frozen model that `megatron_wrap.models.reference` adds."""
    best: BestEvaluation = field(default_factory=BestEvaluation)
    progress: Progress = field(default_factory=Progress)
    offered: PreparedBatch | None = None
    """The last batch that `wrap.batches` yielded in this process."""
    open_step: OpenStep | None = None
    """A step of which `wrap.forward_backward` has computed parts."""
    extra_padding: int = 0
    """Tokens of padding beyond the layout's divisor; `check_parity` sets it to check that padding changes no result."""

    @property
    def global_batch_size(self) -> int:
        """Samples of the next step, over all replicas; grows during a batch size ramp-up."""
        return global_batch_size_at(self.config, self.progress.consumed_samples)


@dataclass(frozen=True)
class StepReport:
    """Metrics of one step, the same on every rank."""

    iteration: int
    metrics: dict[str, float]
    skipped: bool
    flow_metrics: tuple[str, ...]
    """Names of the metrics that the flow reports."""
