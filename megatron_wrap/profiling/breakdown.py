"""Breakdown of the time of a training step, and the waits of a GPU in it, from the trace of torch's profiler. Needs no
process group and no GPU."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_wrap.profiling import kernel_kinds as kinds
from megatron_wrap.profiling.trace import Span, Timeline

_LATENCY = 10.0
"""Microseconds that a kernel may take from its launch on the host to its start on an idle GPU, with the profiler. A
kernel that was launched earlier than this before a wait began was in the GPU's queue."""
_SHORT = 6.0
"""Microseconds; a shorter gap counts as a gap between any two kernels, together with all others."""
_PARTS = (kinds.OPTIMIZER, kinds.LOSS, kinds.DATA)
"""Kinds of work that are named as a whole instead of by their kernels."""


@dataclass(frozen=True)
class Wait:
    """All times between the same two pieces of work in which nothing runs on any stream of a GPU, per step."""

    before: str
    """Name of the last work before the wait: a kernel without namespaces and template arguments, a collective, or a
    part of the step (optimizer, loss, data)."""
    after: str
    """Name of the first work after the wait."""
    count: float
    milliseconds: float
    late_ms: float
    """Part of the waits until the host had launched the next work, ms per step."""

    @property
    def host_was_late(self) -> bool:
        """Whether most of the time was a wait for the host; else the kernel was in the GPU's queue."""
        return 2 * self.late_ms > self.milliseconds


def waits_of(timeline: Timeline) -> tuple[Wait, ...]:
    """The waits of a GPU in the profiled steps, the longest first; together they are the idle time. On a CPU: none."""
    if not timeline.on_gpu or not timeline.steps:
        return ()
    times: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for before, after in _gaps(timeline):
        begin, end = before.end, after.start
        ready = begin if after.launched is None else min(after.launched + _LATENCY, end)
        idle = _time_in_steps(timeline, begin, end)
        if idle > 0:
            times[_group(timeline, before, after)].append((idle, _time_in_steps(timeline, begin, ready)))
    per_step = 1e3 * len(timeline.steps)  # microseconds of all steps -> milliseconds of one
    waits = []
    for group, each in times.items():
        idle, late = map(sum, zip(*each, strict=True))
        waits.append(Wait(*group, len(each) / len(timeline.steps), idle / per_step, late / per_step))
    return tuple(sorted(waits, key=lambda wait: -wait.milliseconds))


def _gaps(timeline: Timeline) -> Iterator[tuple[Span, Span]]:
    """(before, after) of each time in which nothing runs. Spans of length 0 mark the edges of the profile."""
    begin, end = timeline.steps[0][0], timeline.steps[-1][1]
    last = Span(begin, begin, kinds.IDLE, "start of the profile", launched=begin)
    edge = Span(end, end, kinds.IDLE, "end of the profile", launched=end)
    for span in sorted((*timeline.work, *timeline.data, edge), key=lambda span: span.start):
        if span.start > last.end:
            yield last, span
        if span is edge:
            return
        if span.end > last.end:
            last = span


def _time_in_steps(timeline: Timeline, begin: float, end: float) -> float:
    return sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in timeline.steps)


def _group(timeline: Timeline, before: Span, after: Span) -> tuple[str, str]:
    if after.start - before.end < _SHORT:
        return "any kernel", f"the next, below {_SHORT:.0f} us each"
    if _step(timeline, before) == _step(timeline, after):
        return _name(before), _name(after)
    part = after.kind if after.kind in _PARTS else "first kernel"
    return _name(before), f"{part} of the next step"


def _step(timeline: Timeline, span: Span) -> int:
    """Number of the step that launched some work, from 1."""
    return bisect_right([start for start, _ in timeline.steps], span.start if span.launched is None else span.launched)


def _name(span: Span) -> str:
    if span.kind in _PARTS:
        return span.kind
    collective = kinds.collective(span.name) if span.kind == kinds.COMMUNICATION else "other"
    return kinds.short_name(span.name) if collective == "other" else collective


L = TypeVar("L")
Label = tuple[str, str]
"""(kind, collective) of a piece of work; the collective is empty except for communication."""

_PRIORITY: tuple[Label, ...] = (
    *((kind, "") for kind in (kinds.MATMUL, kinds.ATTENTION, kinds.LOSS, kinds.OPTIMIZER)),
    *((kind, "") for kind in (kinds.ELEMENTWISE, kinds.COPIES)),
    *((kinds.COMMUNICATION, collective) for collective in kinds.COLLECTIVES),
    (kinds.DATA, ""),
)
"""Labels in the order in which they count where several kinds run at the same time. Communication is exposed where
nothing else runs, and the wait for data where nothing runs at all."""


@dataclass(frozen=True)
class Work:
    """All calls of one kernel or operation, per step."""

    name: str
    kind: str
    calls: float
    milliseconds: float
    """Sum of the calls' times in ms; for an operation on a CPU, without the operations that it calls."""
    recognized: bool
    """Whether `kernel_kinds` has a rule for the name."""


@dataclass(frozen=True)
class StepBreakdown:
    """Time of one process in milliseconds per step, averaged over the profiled steps."""

    milliseconds: Mapping[str, float]
    """Kind -> time in ms, in the order of `kernel_kinds.KINDS`; the sum is `step_ms`."""
    step_ms: float
    """Wall time in ms from the end of one step to the end of the next."""
    num_steps: int
    on_gpu: bool
    communication_ms: float
    """Time of all communication in ms, exposed or not."""
    exposed_collectives: Mapping[str, float]
    """Collective -> its exposed time in ms."""
    num_kernels: float
    """Number of kernels (on a CPU: operations) per step."""
    computed_tokens: float
    """Tokens per step of this process's replica, with padding; 0: unknown."""
    work: tuple[Work, ...]
    """Kernels and operations, the longest first."""
    waits: tuple[Wait, ...]
    """Idle times of a GPU by the work before and after each, the longest first; empty on a CPU."""

    @property
    def busy_ms(self) -> float:
        """Time in ms in which the device computes: without exposed communication, waits for data and idle time."""
        waiting = (kinds.COMMUNICATION, kinds.DATA, kinds.IDLE)
        return self.step_ms - sum(self.milliseconds[kind] for kind in waiting)

    def share(self, kind: str) -> float:
        """Share of a kind in the step's time, 0 to 1."""
        return self.milliseconds[kind] / self.step_ms if self.step_ms else 0.0


def break_down(timeline: Timeline) -> StepBreakdown:
    """Divide the time of the profiled steps among kinds of work.

    Raises:
        ValueError: the trace has no step.
    """
    steps = timeline.steps
    if not steps:
        raise ValueError("the trace contains no step (ProfilerStep#N)")
    labelled = [(_label(span), span.start, span.end) for span in (*timeline.work, *timeline.data)]
    totals: Counter[Label | None] = Counter()
    for begin, end in steps:
        totals.update(divided(labelled, begin, end, _PRIORITY))
    per_step = 1e3 * len(steps)  # microseconds of all steps -> milliseconds of one
    exposed = {label[1]: time / per_step for label, time in totals.items() if label is not None and label[1]}
    times = {kind: totals[kind, ""] / per_step for kind in kinds.KINDS}
    times |= {kinds.COMMUNICATION: sum(exposed.values()), kinds.IDLE: totals[None] / per_step}
    inside = [span for span in timeline.work if any(begin <= span.start < end for begin, end in steps)]
    collectives = [(span.kind, span.start, span.end) for span in inside if span.kind == kinds.COMMUNICATION]
    communication = sum(
        divided(collectives, begin, end, (kinds.COMMUNICATION,))[kinds.COMMUNICATION] for begin, end in steps
    )
    return StepBreakdown(
        milliseconds=times,
        step_ms=sum(end - begin for begin, end in steps) / per_step,
        num_steps=len(steps),
        on_gpu=timeline.on_gpu,
        communication_ms=communication / per_step,
        exposed_collectives={collective: time for collective, time in exposed.items() if time > 0},
        num_kernels=sum(1 for span in inside if span.whole) / len(steps),
        computed_tokens=timeline.computed_tokens / len(steps),
        work=_work(inside, len(steps)),
        waits=waits_of(timeline),
    )


def divided(
    spans: Iterable[tuple[L, float, float]], begin: float, end: float, priority: Sequence[L]
) -> dict[L | None, float]:
    """Divide the time from `begin` to `end` among labels: each moment belongs to the first label of `priority` that has
    a span there, and to None where no label has one.

    Args:
        spans: (label, start, end), in any order; they may overlap and reach over the bounds.

    Returns:
        Label -> time, of all labels and None; the sum is `end - begin`.
    """
    rank = {label: index for index, label in enumerate(priority)}
    moments: list[tuple[float, int, int]] = []
    for label, start, stop in spans:
        start, stop = max(start, begin), min(stop, end)
        if start < stop:
            moments += [(start, 1, rank[label]), (stop, -1, rank[label])]
    times: dict[L | None, float] = dict.fromkeys((*priority, None), 0.0)
    active, now = [0] * len(priority), begin
    for moment, change, index in sorted(moments):
        times[next((label for label, count in zip(priority, active, strict=True) if count), None)] += moment - now
        active[index] += change
        now = moment
    times[None] += end - now
    return times


def _label(span: Span) -> Label:
    return span.kind, kinds.collective(span.name) if span.kind == kinds.COMMUNICATION else ""


def _work(spans: Sequence[Span], num_steps: int) -> tuple[Work, ...]:
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.name, span.kind].append(span)
    work = []
    for (name, kind), group in groups.items():
        milliseconds = sum(span.end - span.start for span in group) / 1e3 / num_steps
        work.append(Work(name, kind, sum(span.whole for span in group) / num_steps, milliseconds, group[0].recognized))
    return tuple(sorted(work, key=lambda each: -each.milliseconds))


def as_json(breakdown: StepBreakdown, longest: int = 60) -> dict[str, Any]:
    """The numbers by name, with the longest kernels and waits, and every kernel that is not recognized."""
    shown = [vars(work) for index, work in enumerate(breakdown.work) if index < longest or not work.recognized]
    numbers = {name: value for name, value in vars(breakdown).items() if name not in ("on_gpu", "work")}
    numbers["waits"] = [vars(wait) for wait in breakdown.waits[:longest]]
    return {**numbers, "kernels" if breakdown.on_gpu else "operations": shown}
