"""Finds a process that is slower than the others, by the time of its forward passes, gathered in the metrics'
all-reduce.

Processes wait for each other in every step, so that all have the same step time. The forward pass of a micro-batch with
its loss waits only for the other processes of its tensor- or context-parallel group, not for data-parallel replicas or
other pipeline stages.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.utils.dist_logger import logger

_PREFIX = "forward_seconds/"
_FIRST_STEPS = 2
"""Number of first steps that are not compared, because kernels are compiled in them."""


class ForwardClock:
    """Counts the seconds that the forward passes of this process take, without waiting for the device.

    Args:
        device: on CUDA, events are recorded in its stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._seconds, self._of_step = 0.0, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the time of the block."""
        if self._on_device:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._of_step += time.perf_counter() - started

    def end_step(self) -> None:
        """Add the times of the step; to be called after the host has waited for the device, as in the reduction of the
        metrics."""
        self._seconds += self._of_step + sum(begin.elapsed_time(end) / 1000 for begin, end in self._events)
        self._of_step = 0.0
        self._events.clear()

    def take(self) -> float:
        """Seconds of the steps that have ended since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True)
class _Process:
    host: str
    stage: int
    """Pipeline stage."""


class Stragglers:
    """Names the slowest process every `interval` steps, if it is slower than the others of its pipeline stage. The
    construction is collective.

    Args:
        factor: a process is slow from this multiple of the median of the others on.
    """

    def __init__(self, parallel: ParallelState, device: torch.device, interval: int, factor: float) -> None:
        self.clock = ForwardClock(device)
        self._device, self._interval, self._factor = device, interval, factor
        self._rank, self._size = parallel.world.rank, parallel.world.size
        self._shares_passes = parallel.tp.size * parallel.cp.size > 1
        self._processes = gather_objects(_Process(socket.gethostname(), parallel.pp.rank))
        self._steps = -_FIRST_STEPS
        """Number of steps whose seconds `clock` contains, the current one included; 0 or less during the first
        steps."""

    def summands(self) -> dict[str, Tensor]:
        """This process's summand of the seconds of all processes, to be summed over ranks; empty if no comparison is
        due. To be called once in each step."""
        self._steps += 1
        if self._steps <= self._interval:
            return {}
        seconds = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        seconds[self._rank].fill_(self.clock.take())
        return {f"{_PREFIX}{rank}": value for rank, value in enumerate(seconds.unbind())}

    def compare(self, sums: dict[str, float]) -> None:
        """Remove the seconds from the reduced values, and log which process is slow; to be called after `summands`."""
        self.clock.end_step()
        if self._steps <= 0:
            self.clock.take()
        seconds = {rank: sums.pop(f"{_PREFIX}{rank}") for rank in range(self._size) if f"{_PREFIX}{rank}" in sums}
        if not seconds:
            return
        steps, self._steps = self._steps - 1, 1
        slowest = self.slowest(seconds)
        if slowest is not None:
            rank, others = slowest
            hint = "; it, or another of its tensor- or context-parallel group" if self._shares_passes else ""
            logger.warning_rank_0(
                f"rank {rank} on {self._processes[rank].host} is slow: its forward passes took "
                f"{seconds[rank] / others:.2f} times as long as those of the others of its pipeline stage, "
                f"{seconds[rank] / steps:.3g} and {others / steps:.3g} s in each of the last {steps} steps{hint}"
            )

    def slowest(self, seconds: Mapping[int, float]) -> tuple[int, float] | None:
        """(rank, median of the others of its stage) of the process that exceeds this median by the largest factor; None
        if none exceeds it by more than the limit.

        Args:
            seconds: rank -> time of its forward passes.
        """
        slow: list[tuple[float, int, float]] = []
        for rank, elapsed in seconds.items():
            stage = self._processes[rank].stage
            others = [
                value for other, value in seconds.items() if other != rank and self._processes[other].stage == stage
            ]
            median = statistics.median(others) if others else 0.0
            if median > 0 and elapsed > self._factor * median:
                slow.append((elapsed / median, rank, median))
        return max(slow)[1:] if slow else None
