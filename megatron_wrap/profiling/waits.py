"""Waits of a GPU in a step: the kernels before and after each wait, its length, and whether the host had launched the
next kernel."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

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
