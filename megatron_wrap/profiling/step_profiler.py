"""Profiles steps of a run: traces, a memory snapshot, and the table of the time of a step."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.profiling.advice import ProfiledRun, StepMemory, memory_changes, promising_changes
from megatron_wrap.profiling.breakdown import StepBreakdown, break_down
from megatron_wrap.profiling.table import ProfileReport, json_of, slowest_rank, text
from megatron_wrap.profiling.trace import read_timeline
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from megatron_wrap.config import RunConfig
    from megatron_wrap.parallel.state import ParallelState
    from megatron_wrap.plan.flops import Flops
    from megatron_wrap.platform.base.platform import Platform

_GIB = 2**30
_SNAPSHOT_ENTRIES = 200_000


class StepProfiler:
    """Profiles the iterations of `megatron_wrap.profile.steps`. A step begins at the end of the previous step, so it
    includes the wait for its batch.

    Args:
        iteration: number of steps already taken.
        folder: receives the files, in a subfolder for each range of consecutive iterations.
        run: facts about the run, without the numbers that are measured.
        flops: FLOPs of a step.
        avoidable_logits_bytes: memory of this process that linear_cross_entropy would save.
    """

    def __init__(
        self,
        config: RunConfig,
        platform: Platform,
        parallel: ParallelState,
        iteration: int,
        folder: Path,
        *,
        run: ProfiledRun,
        flops: Flops,
        avoidable_logits_bytes: int,
    ) -> None:
        self._config, self._platform, self._parallel = config, platform, parallel
        self._first, self._folder = iteration + 1, folder
        self._run, self._flops, self._avoidable_logits_bytes = run, flops, avoidable_logits_bytes
        self._steps = frozenset(step for step in config.profile.steps if step > iteration)
        self._cuda = platform.name == "cuda"
        self._usual: list[float] = []
        self._last_end = time.perf_counter()
        self._recorded: list[tuple[int, Mapping[str, float]]] = []
        self._trace: Path | None = None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile: profile | None = profile(
            activities=activities, schedule=self._action, on_trace_ready=self._export
        )
        self._profile.start()
        self._records_memory = False
        self._record_memory(iteration + 1, first=True)

    def step_ends(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Call after each step. Collective after the last step of a range of profiled iterations.

        Args:
            iteration: number of the step.
            metrics: metrics of the step.
        """
        if self._profile is None:
            return
        is_profiled, next_is_profiled = iteration in self._steps, iteration + 1 in self._steps
        if is_profiled != next_is_profiled:
            self._platform.synchronize()  # a range begins and ends with an idle device
        now = time.perf_counter()
        if self._records_memory:
            folder = self._range_folder(iteration if is_profiled else iteration + 1)
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank{self._rank}.pickle"))
            self._stop_recording_memory()
        if is_profiled:
            self._recorded.append((iteration, dict(metrics)))
        elif not next_is_profiled:  # the profiler warms up in the step before a range
            self._usual.append(1e3 * (now - self._last_end))
        self._last_end = now
        self._profile.step()
        if is_profiled and not next_is_profiled:
            self._report()
            self._last_end = time.perf_counter()
        if iteration >= max(self._steps):
            self.close()
        else:
            self._record_memory(iteration + 1)

    def close(self) -> None:
        """Stop the profiler."""
        if self._profile is not None:
            running, self._profile, self._trace = self._profile, None, None
            self._recorded = []
            running.stop()
            if self._records_memory:
                self._stop_recording_memory()

    def _action(self, index: int) -> ProfilerAction:
        """The profiler's action in step `index`, counted from 0 in this process."""
        iteration = self._first + index
        if iteration in self._steps:
            return ProfilerAction.RECORD if iteration + 1 in self._steps else ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if iteration + 1 in self._steps else ProfilerAction.NONE

    def _record_memory(self, iteration: int, first: bool = False) -> None:
        """Record allocations in the step before a range, because recording slows Python down. If the range begins with
        the first step of this process, record them in that step."""
        begins = first if iteration in self._steps else iteration + 1 in self._steps
        if begins and self._cuda and self._config.profile.memory_snapshot:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_SNAPSHOT_ENTRIES)
            self._records_memory = True

    def _stop_recording_memory(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)
        self._records_memory = False

    @property
    def _rank(self) -> int:
        return self._parallel.world.rank

    def _range_folder(self, iteration: int) -> Path:
        """Folder of the range of consecutive iterations that contains `iteration`; created."""
        first = last = iteration
        while first - 1 in self._steps:
            first -= 1
        while last + 1 in self._steps:
            last += 1
        folder = self._folder / f"iterations-{first}-{last}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _export(self, finished: profile) -> None:
        if not self._recorded:
            return  # the run ended within a range
        self._trace = self._range_folder(self._recorded[-1][0]) / f"trace-rank{self._rank}.json.gz"
        plain = self._trace.with_suffix("")
        finished.export_chrome_trace(str(plain))  # torch would compress it line by line, of which it has 100,000
        with plain.open("rb") as source, gzip.open(self._trace, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(source, compressed, 1 << 20)
        plain.unlink()

    def _report(self) -> None:
        """Compare all processes, keep the files of rank 0 and of the slowest rank, write and log the table."""
        assert self._trace is not None
        folder = self._trace.parent
        breakdown = break_down(read_timeline(self._trace))
        memory = StepMemory(self._platform.memory_gib()["memory_max"], self._avoidable_logits_bytes / _GIB)
        shared: list[tuple[StepBreakdown, StepMemory]] = gather_objects((breakdown, memory))
        ranks = tuple(step for step, _ in shared)
        if self._rank not in (0, slowest_rank(ranks)):
            self._trace.unlink()
            (folder / f"memory-rank{self._rank}.pickle").unlink(missing_ok=True)
        if self._rank == 0:
            report = self._profile_report(ranks, [memory for _, memory in shared])
            (folder / "profile.json").write_text(json.dumps(json_of(report), indent=1) + "\n")
            (folder / "profile.txt").write_text(text(report) + "\n")
            logger.info_rank_0(f"profile of {text(report)}\n{folder}")
        self._recorded = []

    def _profile_report(self, ranks: tuple[StepBreakdown, ...], memory: list[StepMemory]) -> ProfileReport:
        config, metrics = self._config, [metrics for _, metrics in self._recorded]
        slowest = ranks[slowest_rank(ranks)]
        real_tokens = sum(values["tokens_per_second"] * values["elapsed_time"] for values in metrics) / len(metrics)
        computed_tokens = slowest.computed_tokens * self._parallel.dp.size
        run = dataclasses.replace(
            self._run,
            padding_share=max(0.0, 1 - real_tokens / computed_tokens) if computed_tokens else 0.0,
            product_flops=self._flops.of(real_tokens, 0.0) / self._parallel.world.size,
            peak_gib=memory[0].peak_gib,
        )
        return ProfileReport(
            iterations=tuple(iteration for iteration, _ in self._recorded),
            ranks=ranks,
            usual_step_ms=statistics.median(self._usual[1:]) if len(self._usual) > 1 else None,
            tflops=metrics[-1].get("tflops", 0.0),
            peak_memory_gib=run.peak_gib,
            padding_share=run.padding_share,
            changes=tuple(promising_changes(slowest, config, run)),
            memory_changes=tuple(memory_changes(memory)),
            title=f"{config.name} ({self._platform.name}, {self._parallel.layout})",
        )
