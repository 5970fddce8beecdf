"""A step: what is counted before it, what it has summed so far, and the result of its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_wrap.engine.batches.micro_batch import StepCounts
    from megatron_wrap.engine.state.random_states import RandomStates
    from megatron_wrap.metrics.metric import MetricSums


@dataclass(frozen=True)
class StepWeights:
    """What the loss of each micro-batch needs of the whole step; counted before its first backward pass."""

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
    """time.perf_counter() at its beginning."""
    samples: Sequence[Any]
    """Of the global batch, as far as they have been passed."""
    random_states: RandomStates | None = None
    """Of this process at its beginning, to repeat it; None: a non-finite loss is not refused."""
    parts: int = 0
    """Parts that have been passed, of a step in parts."""


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step; the same on every rank."""

    applied: bool = False
    """Parameters were updated; False on an fp16 overflow, or if the batch has no loss weight."""
    grad_norm: float = 0.0
    """Norm of the gradient over all parameters before clipping; 0 on an overflow."""
    num_zeros: int = 0
    """Number of zeros in the gradient, if they are counted."""
    is_bad: bool = False
    """Not applied, and no state changed: the loss or the norm of the gradient is not finite, or the loss is a spike."""
