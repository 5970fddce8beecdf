"""State of a run between steps, and of a step in progress: the counts made before it, the sums so far, the random
generators at its beginning, and the result of its update."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from megatron_wrap.config.schema.derived import global_batch_size_at
from megatron_wrap.data.order.batching import Cursor
from megatron_wrap.engine.batches.global_batch import PreparedBatch
from megatron_wrap.engine.batches.micro_batching import MicroBatching, has_step_samples
from megatron_wrap.plan.flops import Flops, forward_flops, training_flops
from megatron_wrap.platform.megatron_core.generation import without_fp8
from megatron_wrap.platform.megatron_core.graphs import set_tracked_states, tracked_states

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_wrap.config.schema.run import RunConfig
    from megatron_wrap.engine.batches.global_batch import SampleSharing
    from megatron_wrap.engine.batches.micro_batch import Localization, StepCounts
    from megatron_wrap.engine.passes.loss import CalculateLoss, MetricReduction
    from megatron_wrap.engine.passes.pipeline_schedule import PipelineSchedule
    from megatron_wrap.engine.passes.reference_model import ReferenceModel
    from megatron_wrap.engine.passes.stragglers import Stragglers
    from megatron_wrap.flow import MegatronWrapTrainingFlowBase
    from megatron_wrap.metrics.metric import MetricSums
    from megatron_wrap.parallel.state import ParallelState
    from megatron_wrap.plan.model_parts import ModelShape
    from megatron_wrap.platform.base.platform import Platform


@dataclass(frozen=True)
class StepWeights:
    """Counts of the whole step that the loss of each micro-batch needs; made before the first backward pass."""

    counts: StepCounts
    """Loss weights and tokens over all micro-batches and replicas."""
    num_microbatches: int
    """Micro-batches of one replica."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Statistics of the whole step, if the flow declares any; on the last pipeline stage."""
    sizes: tuple[int, ...] = ()
    """Samples of each part of the step."""
    iteration: int = 0
    """Steps taken before this one."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each loss term over the whole step, all ranks."""
        return dict(self.counts.weights)


@dataclass
class OpenStep:
    """A step whose gradients are being computed."""

    weights: StepWeights
    sums: MetricSums
    """Metrics of the micro-batches so far."""
    started: float
    """Value of time.perf_counter() at the beginning of the step, in seconds."""
    samples: Sequence[Any]
    """Samples of the global batch that have been passed so far."""
    random_states: RandomStates | None = None
    """States of this process's random generators at the beginning of the step, to repeat it; None: a non-finite loss is
    not refused."""
    parts: int = 0
    """Number of parts that have been passed, if the step is passed in parts."""


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step; the same on every rank."""

    applied: bool = False
    """Whether parameters were updated; False on an fp16 overflow, or if the batch has no loss weight."""
    grad_norm: float = 0.0
    """Norm of the gradient over all parameters before clipping; 0 on an overflow."""
    num_zeros: int = 0
    """Number of zeros in the gradient, if they are counted."""
    is_bad: bool = False
    """Whether the step is bad: the loss or the gradient norm is not finite, or the loss is a spike. No state was
    changed."""


@dataclass(frozen=True)
class RandomStates:
    """States of Python's, numpy's, torch's, the device's and Megatron-Core's random generators. `now` takes tens of
    microseconds and does not wait for the device."""

    python: Any
    numpy: Any
    host: Tensor
    """State of torch's generator on the CPU."""
    device: Tensor | None
    """State of the GPU's generator; None without a GPU."""
    tracker: dict[str, Tensor]
    """States of Megatron-Core's generators, by name."""

    @classmethod
    def now(cls, device: torch.device) -> RandomStates:
        """The current states."""
        return cls(
            random.getstate(),
            numpy.random.get_state(legacy=True),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if device.type == "cuda" else None,
            tracked_states(),
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        set_tracked_states(self.tracker)


@dataclass
class BestEvaluation:
    """The best evaluation of `wrap.fit` by `megatron_wrap.checkpoint.best_metric`, saved in a checkpoint; the same on
    every rank."""

    iteration: int | None = None
    """Iteration of the best evaluation; None: there is none yet."""
    value: float | None = None
    """Value of the metric in the best evaluation; None: there is none yet."""
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
    """Counters that a checkpoint contains; the same on every rank."""

    iteration: int = 0
    """Steps taken, skipped ones included."""
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Tokens trained on, without padding."""
    skipped_iterations: int = 0
    """Steps without an update: loss-scale overflow, no loss weight in the whole batch, or a bad step."""
    bad_steps: int = 0
    """Number of steps whose loss or gradient was not finite or whose loss was a spike, and after which the run
    continued."""
    rollbacks: int = 0
    """Number of times the run returned to a checkpoint after a bad step."""
    left_out: list[int] = field(default_factory=list)
    """Positions in the order of the training data of samples that no later step takes, ascending."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last steps with an update, at most `megatron_wrap.bad_steps.spike_window`; [] without a
    spike_threshold."""
    skipped_samples: int = 0
    """Number of rows of the data that were left out because they cannot be used."""
    data: dict[str, Any] = field(default_factory=dict)
    """State of the order of samples, as far as `consumed_samples` does not imply it: `Cursor.saved`."""

    @property
    def cursor(self) -> Cursor:
        """The position at which the order of samples continues."""
        return Cursor.of(self.consumed_samples, self.data)

    def consume(self, batch: Sequence[Any]) -> None:
        """Count the samples of a step.

        Args:
            batch: its samples; the order of the data continues after a `PreparedBatch` whose cursor is this one.
        """
        if isinstance(batch, PreparedBatch) and batch.before == self.cursor:
            self.data = batch.after.saved()
            self.skipped_samples += len(batch.bad_rows)
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
    lr_scheduler: Any
    """OptimizerParamScheduler; None if there is no optimizer."""
    prepare_sample: Callable[[Any], Any]
    """The flow's `prepare_sample`, after outputs computed before training were added to the sample."""
    calculate_loss: CalculateLoss
    """The flow's `calculate_loss`; `check_parity` wraps it in an observer."""
    shape: ModelShape
    micro_batching: MicroBatching
    """Rule by which a batch is split into micro-batches."""
    localization: Localization
    """Takes this process's part of micro-batches."""
    pipeline_schedule: PipelineSchedule
    """Runs micro-batches through model chunks."""
    sharing: SampleSharing
    """Shares each call's samples with all processes."""
    reduction: MetricReduction
    """Sums metrics over ranks."""
    stragglers: Stragglers | None = None
    """Comparison of the processes' times; None: they are not compared."""
    reference: ReferenceModel | None = None
    """The frozen model of `megatron_wrap.models`, the reference or the teacher."""
    best: BestEvaluation = field(default_factory=BestEvaluation)
    progress: Progress = field(default_factory=Progress)
    offered: PreparedBatch | None = None
    """The batch that `wrap.batches` yielded last in this process, until a step consumes it."""
    open_step: OpenStep | None = None
    """Step of which `wrap.forward_backward` has computed parts; None: no such step is open."""
    stop_requested: Callable[[], bool] = bool
    """Function that returns whether this process knows of a request to end the run."""
    steps_without_weight: int = 0
    """Number of last steps in a row whose batch had no loss weight; not saved."""
    bad_steps_in_a_row: int = 0
    """Number of last steps in a row that were bad; not saved."""
    extra_padding: int = 0
    """Tokens of padding beyond the layout's divisor; `check_parity` sets it to check that padding changes no result."""
    policy_flops: Flops = field(init=False)
    """FLOPs of a step's passes of the trained model."""

    def __post_init__(self) -> None:
        self.policy_flops = training_flops(self.shape)
        if self.flow.step_values_from == "outputs":
            self.policy_flops += forward_flops(self.shape)

    def with_cursor(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Samples of a step with their cursor in the training data. A list that is trained on while a batch of
        `wrap.batches` is open, such as one made from its samples, gets the cursor of that batch."""
        if isinstance(samples, PreparedBatch) or self.offered is None:
            return samples
        return self.offered.with_samples(samples)

    @property
    def step_flops(self) -> Flops:
        """FLOPs of all passes of a step over its tokens; samples of `get_step_samples` are counted with as many
        tokens."""
        if self.reference is None:
            return self.policy_flops
        flops = self.policy_flops + self.reference.flops
        two_batches = self.flow.step_values_from is not None and has_step_samples(self.flow)
        return flops + self.reference.flops if two_batches else flops

    def zero_gradients(self) -> None:
        """Zero the gradient buffers. Optimizers that are not distributed also take the buffers as the parameters'
        `grad`, to which the next backward pass would add."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Context without dropout, graph and FP8, for forward passes between steps. With `overlap_param_gather` the
        parameters are gathered first, because in training the forward pass gathers them. A nested use changes
        nothing."""
        if not self.chunks[0].training:
            yield
            return
        overlapped = self.config.ddp.overlap_param_gather and self.optimizer is not None
        for chunk in self.chunks:
            chunk.eval()
            if overlapped:
                chunk.disable_forward_pre_hook(param_sync=True)
        try:
            with torch.no_grad(), without_fp8(self.chunks) if self.transformer_config.fp8 else nullcontext():
                yield
        finally:
            for chunk in self.chunks:
                chunk.train()
                if overlapped:
                    chunk.enable_forward_pre_hook()

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
    stop_requested: bool = False
    """Whether a process knows of a request to end the run."""
    is_trained: bool = True
    """Whether a token of the step had a loss."""
