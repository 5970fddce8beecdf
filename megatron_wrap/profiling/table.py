"""The table of a profiled step, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wrap.profiling.advice import Change, MemoryChange
from megatron_wrap.profiling.breakdown import StepBreakdown, as_json
from megatron_wrap.profiling.kernel_kinds import IDLE, KINDS

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


def text(report: ProfileReport) -> str:
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
    lines += ["", *_facts(report), *_waits(report, chosen), "", *_advice(report)]
    return "\n".join(lines)


def _facts(report: ProfileReport) -> list[str]:
    step = report.ranks[report.slowest]
    facts = [f"{report.tflops:.3g} model TFLOP/s per device", f"{report.peak_memory_gib:.1f} GiB"]
    facts.append(f"{step.num_kernels:,.0f} {'kernels' if step.on_gpu else 'operations'} a step")
    if report.padding_share:
        facts.append(f"{report.padding_share:.0%} padding")
    if step.communication_ms:
        facts.append(f"{step.communication_ms:,.1f} ms of communication in all")
    lines = [", ".join(facts)]
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


def json_of(report: ProfileReport) -> dict[str, Any]:
    """All numbers by name, as in profile.json."""
    return vars(report) | {
        "slowest_rank": report.slowest,
        "changes": [vars(change) for change in report.changes],
        "memory_changes": [vars(change) for change in report.memory_changes],
        "ranks": [as_json(step) for step in report.ranks],
    }
