"""Profiles steps of a run: traces, a memory snapshot, and the table of the time of a step, as text and as JSON."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.profiling.advice import (
    Change,
    MemoryChange,
    ProfiledRun,
    StepMemory,
    memory_changes,
    promising_changes,
)
from megatron_wrap.profiling.breakdown import StepBreakdown, as_json, break_down
from megatron_wrap.profiling.kernel_kinds import IDLE, KINDS
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
        run: description of the run, without the numbers that are measured.
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
            (folder / "profile.json").write_text(json.dumps(table_json(report), indent=1) + "\n")
            (folder / "profile.txt").write_text(table_text(report) + "\n")
            logger.info_rank_0(f"profile of {table_text(report)}\n{folder}")
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


_LEAST_IDLE = 0.01
"""Share of the step below which idle time is too short for the text to name waits."""
_LONGEST_WAITS = 3
_NAME_LENGTH = 48


@dataclass(frozen=True)
class ProfileReport:
    """Consecutive profiled steps of a run, on all processes."""

    iterations: tuple[int, ...]
    ranks: tuple[StepBreakdown, ...]
    """Breakdowns of all processes, by rank."""
    usual_step_ms: float | None
    """Median time in ms of earlier steps, which were not profiled; None: there were none."""
    tflops: float
    """Model TFLOP/s per device of the last profiled step."""
    peak_memory_gib: float
    """Peak memory of rank 0, GiB."""
    padding_share: float
    changes: tuple[Change, ...]
    memory_changes: tuple[MemoryChange, ...]
    title: str
    """Title of the table: the run, its layout and platform."""

    @property
    def slowest(self) -> int:
        """Breakdown of the rank that computes longest; the others wait for it."""
        return slowest_rank(self.ranks)


def slowest_rank(ranks: Sequence[StepBreakdown]) -> int:
    """The rank with the longest computation time; the first of equals."""
    return max(range(len(ranks)), key=lambda rank: (ranks[rank].busy_ms, -rank))


def table_text(report: ProfileReport) -> str:
    """Title, table, further numbers and the suggested changes, for the console."""
    chosen = [0] if report.slowest == 0 else [0, report.slowest]
    first, last = report.iterations[0], report.iterations[-1]
    lines = [f"{report.title}, iterations {first} to {last}" if first != last else f"{report.title}, iteration {first}"]
    if len(report.ranks) > 1:
        names = [f"rank {rank}" + (" (slowest)" if rank == report.slowest else "") for rank in chosen]
        lines.append(" " * 24 + "".join(f"{name:>21}" for name in names))
    for row in (*KINDS, "step"):
        steps = [report.ranks[rank] for rank in chosen]
        times = [(step.step_ms, 1.0) if row == "step" else (step.milliseconds[row], step.share(row)) for step in steps]
        name = "idle (Python)" if row == IDLE and not steps[0].on_gpu else row
        lines.append(f"{name:<24}" + "".join(f"{time:>11,.1f} ms {share:>6.1%}" for time, share in times))
    lines += ["", *_summary(report), *_waits(report, chosen), "", *_advice(report)]
    return "\n".join(lines)


def _summary(report: ProfileReport) -> list[str]:
    step = report.ranks[report.slowest]
    parts = [f"{report.tflops:.3g} model TFLOP/s per device", f"{report.peak_memory_gib:.1f} GiB"]
    parts.append(f"{step.num_kernels:,.0f} {'kernels' if step.on_gpu else 'operations'} a step")
    if report.padding_share:
        parts.append(f"{report.padding_share:.0%} padding")
    if step.communication_ms:
        parts.append(f"{step.communication_ms:,.1f} ms of communication in all")
    lines = [", ".join(parts)]
    if report.usual_step_ms is not None:
        slower = step.step_ms / report.usual_step_ms - 1
        note = "; the profiler slows Python down, so idle is less without it" if slower > 0.05 else ""
        lines.append(f"steps without the profiler: {report.usual_step_ms:,.1f} ms ({slower:+.1%} with it){note}")
    unknown = [work for work in step.work if not work.recognized]
    if unknown:
        time = sum(work.milliseconds for work in unknown)
        lines.append(f"kernels with unknown names count as elementwise: {time:,.1f} ms, such as {unknown[0].name[:60]}")
    return lines


def _waits(report: ProfileReport, chosen: Sequence[int]) -> list[str]:
    """The longest waits of the GPU that is idle longest in the table. The rank that computes longest is often idle
    least, because it waits for the others in its communication."""
    rank = max(chosen, key=lambda rank: report.ranks[rank].share(IDLE))
    step = report.ranks[rank]
    if not step.waits or step.share(IDLE) < _LEAST_IDLE:
        return []
    lines = ["", f"longest waits of the GPU{f' of rank {rank}' if len(chosen) > 1 else ''} in a step:"]
    for wait in step.waits[:_LONGEST_WAITS]:
        reason = "Python was late" if wait.host_was_late else "waited for another stream or its launch"
        names = f"{wait.before[:_NAME_LENGTH]} -> {wait.after[:_NAME_LENGTH]}"
        lines.append(f"{wait.milliseconds:>8,.1f} ms {wait.count:>8,.1f} times  {names}: {reason}")
    return lines


def _advice(report: ProfileReport) -> list[str]:
    step_ms = report.ranks[report.slowest].step_ms
    faster = [
        (change.override, f"{change.saves_ms:,.1f} ms ({change.saves_ms / step_ms:.1%}) a step", change.reason)
        for change in report.changes
    ]
    smaller = [
        (change.override, f"{change.saves_gib:,.3g} of {change.peak_gib:,.3g} GiB", change.reason)
        for change in report.memory_changes
    ]
    lines = [] if faster else ["no change of one key could save more than 1% of the step"]
    for title, changes in (("most promising:", faster), ("less memory:", smaller)):
        lines += [title] if changes else []
        for number, (override, share, reason) in enumerate(changes, start=1):
            lines += [f"{number}. {override}", f"   could save at most {share}", f"   {reason}"]
    return lines


def table_json(report: ProfileReport) -> dict[str, Any]:
    """All numbers by name, as in profile.json."""
    return vars(report) | {
        "slowest_rank": report.slowest,
        "changes": [vars(change) for change in report.changes],
        "memory_changes": [vars(change) for change in report.memory_changes],
        "ranks": [as_json(step) for step in report.ranks],
    }
