"""A step in progress: the counts made before it, the sums so far, the random generators at its beginning, and the
result of its update."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from megatron_wrap.platform.megatron_core.graphs import set_tracked_states, tracked_states

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_wrap.engine.batches.micro_batch import StepCounts
    from megatron_wrap.metrics.metric import MetricSums


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
