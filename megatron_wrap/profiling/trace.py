"""Reads a Chrome trace of torch's profiler as spans of work: GPU kernels, or CPU operations."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.metrics import phases
from megatron_wrap.profiling import kernel_kinds as kinds

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_CALLERS = ("autograd::", "torch::autograd::", "torch::")
_STEP = re.compile(r"ProfilerStep#\d+")


@dataclass(frozen=True)
class Span:
    """Work of one kind from `start` to `end`, in microseconds."""

    start: float
    end: float
    kind: str
    name: str
    recognized: bool = True
    """Whether `kernel_kinds` has a rule for the name."""
    whole: bool = True
    """Whether the span begins an operation; False: a later part of one, after another operation that it called."""
    launched: float | None = None
    """Time at which the host launched the work, in microseconds; None: on a CPU, or not in the trace."""


@dataclass(frozen=True)
class Timeline:
    """Work of one process in the profiled steps."""

    steps: tuple[tuple[float, float], ...]
    """(start, end) of each step, in microseconds."""
    work: tuple[Span, ...]
    """Work of all GPU streams; on a CPU, work of the main thread and the communication of all threads."""
    data: tuple[Span, ...]
    """Times in which the main thread reads, collates or copies batches."""
    on_gpu: bool
    computed_tokens: float
    """Tokens of all steps, with padding; 0: unknown."""


def read_timeline(path: Path) -> Timeline:
    """The timeline of a trace file (.json or .json.gz)."""
    content = path.read_bytes()
    return timeline_of(json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"])


def timeline_of(events: Sequence[Mapping[str, Any]]) -> Timeline:
    """The timeline of a trace's events."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = sorted((event for event in spans if _is_step(event)), key=lambda event: event["ts"])
    main = steps[0]["tid"] if steps else None
    ranges = _Ranges(events, spans)
    on_gpu = any(event.get("cat") in _GPU_WORK for event in spans)
    work = _gpu_work(spans, ranges) if on_gpu else _cpu_work(spans, ranges, main)
    return Timeline(
        steps=tuple((event["ts"], event["ts"] + event["dur"]) for event in steps),
        work=tuple(work),
        data=tuple(
            Span(start, end, kinds.DATA, phases.DATA, launched=start) for start, end in ranges.of(phases.DATA, main)
        ),
        on_gpu=on_gpu,
        computed_tokens=sum(
            float(event["name"].removeprefix(phases.COMPUTED_TOKENS))
            for event in spans
            if event["name"].startswith(phases.COMPUTED_TOKENS) and event.get("cat") == "user_annotation"
        ),
    )


def _is_step(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and _STEP.fullmatch(event["name"]) is not None


class _Ranges:
    """Times in which each thread is in a phase: the phase's annotations, and for the loss also the backward operations
    that the profiler links to its forward operations."""

    def __init__(self, events: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]]) -> None:
        ranges: dict[tuple[str, Any], list[tuple[float, float]]] = defaultdict(list)
        for event in spans:
            if event.get("cat") == "user_annotation":
                name = phases.OPTIMIZER if event["name"].startswith("Optimizer.step") else event["name"]
                ranges[name, event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        self._ranges = {key: _joined(of_phase) for key, of_phase in ranges.items()}
        backward = self._backward_of_the_loss(events)
        for event in spans:
            if event.get("cat") == "cpu_op" and (event["tid"], event["ts"]) in backward:
                ranges[phases.LOSS, event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        self._ranges = {key: _joined(of_phase) for key, of_phase in ranges.items()}

    def _backward_of_the_loss(self, events: Sequence[Mapping[str, Any]]) -> set[tuple[Any, float]]:
        """(thread, start) of the loss's backward operations."""
        links = [event for event in events if event.get("cat") == "fwdbwd"]
        forward = {
            event["id"]
            for event in links
            if event["ph"] == "s" and self.phase_at(event["ts"], event["tid"]) == phases.LOSS
        }
        return {(event["tid"], event["ts"]) for event in links if event["ph"] == "f" and event["id"] in forward}

    def of(self, name: str, thread: Any) -> list[tuple[float, float]]:
        """Times of a phase on a thread, in order, without overlaps."""
        return self._ranges.get((name, thread), [])

    def phase_at(self, moment: float, thread: Any) -> str | None:
        """The phase of a thread at a moment, the optimizer or the loss; None: another one."""
        for name in (phases.OPTIMIZER, phases.LOSS):
            ranges = self.of(name, thread)
            index = bisect_right(ranges, (moment, float("inf"))) - 1
            if index >= 0 and moment < ranges[index][1]:
                return name
        return None


def _kind(named: str, phase: str | None) -> str:
    """Kind of work by its name and by the part of the step that it belongs to."""
    if phase is None or named == kinds.COMMUNICATION or (phase, named) == (phases.LOSS, kinds.MATMUL):
        return named
    return kinds.OPTIMIZER if phase == phases.OPTIMIZER else kinds.LOSS


def _joined(ranges: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _gpu_work(spans: Sequence[Mapping[str, Any]], ranges: _Ranges) -> Iterator[Span]:
    """Kernels and copies. A kernel that the optimizer or the loss launched belongs to it, except communication and the
    loss's matmuls, which are those of the output layer."""
    launched = {
        event["args"]["correlation"]: (event["ts"], event["tid"])
        for event in spans
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    for event in spans:
        if event.get("cat") not in _GPU_WORK:
            continue
        named = kinds.kernel_kind(event["name"])
        moment, thread = launched.get(event.get("args", {}).get("correlation"), (None, None))
        phase = None if moment is None else ranges.phase_at(moment, thread)
        kind, end = _kind(named or kinds.ELEMENTWISE, phase), event["ts"] + event["dur"]
        yield Span(event["ts"], end, kind, event["name"], recognized=named is not None, launched=moment)


def _cpu_work(spans: Sequence[Mapping[str, Any]], ranges: _Ranges, main: Any) -> Iterator[Span]:
    """The main thread's operations, each without the operations that it calls, and the communication of all threads.

    An operation within a matmul, attention, communication, the loss or the optimizer belongs to it, except the loss's
    matmuls. An operation that only calls others, such as an autograd function in Python, does no work itself:
    communication that it waits for is exposed.
    """
    for event in spans:
        if event.get("cat") == "user_annotation" and kinds.operation_kind(event["name"]) == kinds.COMMUNICATION:
            yield Span(event["ts"], event["ts"] + event["dur"], kinds.COMMUNICATION, event["name"])
    operations = [event for event in spans if event.get("cat") == "cpu_op" and event["tid"] == main]
    calls: list[_Call] = []
    for event in sorted(operations, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while calls and calls[-1].end <= start:
            closed = calls.pop()
            yield from closed.part(closed.end)
        named, phase = kinds.operation_kind(event["name"]), ranges.phase_at(start, main)
        kind = _kind(named, phase)
        works = "::" in event["name"] and not event["name"].startswith(_CALLERS)
        if calls:
            yield from calls[-1].part(start, resumed=end)
            caller = calls[-1].kind
            is_product = (caller, kind) == (kinds.LOSS, kinds.MATMUL)
            if caller not in (kinds.ELEMENTWISE, kinds.COPIES) and not is_product:
                kind = caller
        calls.append(_Call(event["name"], kind, start, end, works))
    for call in reversed(calls):
        yield from call.part(call.end)


@dataclass
class _Call:
    """An operation that has not ended."""

    name: str
    kind: str
    begin: float
    """Start of the part after the last operation that it called, in microseconds."""
    end: float
    works: bool
    """Whether the operation does work itself; False: it only calls others."""
    is_new: bool = True

    def part(self, until: float, resumed: float = 0.0) -> Iterator[Span]:
        """The operation's own work until a moment; it continues at `resumed`."""
        if self.works and until > self.begin:
            yield Span(self.begin, until, self.kind, self.name, whole=self.is_new)
            self.is_new = False
        self.begin = resumed
