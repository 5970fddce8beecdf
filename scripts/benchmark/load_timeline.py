"""When a load of a checkpoint reads, hashes, copies and waits; for checkpoint_cost.py."""

import contextlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

HASH, READ, WAIT, COPY, ALL_READING = "hash", "read", "wait for hashes", "copy", "all reading"


@dataclass(frozen=True)
class Span:
    """Something that one thread did; times are those of time.perf_counter()."""

    kind: str
    begin: float
    end: float
    processor_seconds: float
    thread: int


class Timeline:
    """What the threads of one load do; `recording` collects it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.begin = self.end = 0.0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the hashing and reading of the loads in this context."""
        from megatron_wrap.checkpoint.files import verification
        from megatron_wrap.platform.megatron_core import checkpoint_reader

        reader, compared = checkpoint_reader.RestrictedReader, verification.BlockVerification
        owners = [
            *((verification, "read_block", HASH), (compared, "_compared_bytes", WAIT)),
            *((reader, "_read_part", READ), (reader, "_pass_on", COPY), (reader, "read_data", ALL_READING)),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, kind in owners:
                stack.enter_context(mock.patch.object(owner, name, self._recorded(kind, getattr(owner, name))))
            self.begin = time.perf_counter()
            yield
            self.end = time.perf_counter()

    def _recorded(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            begin, processor = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                used = time.thread_time() - processor
                self.spans.append(Span(kind, begin, time.perf_counter(), used, threading.get_ident()))

        return call

    def summary(self) -> dict[str, float]:
        """Seconds from the begin of the load to events, and sums over the threads."""
        by_kind: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            by_kind[span.kind].append(span)
        values = {"load": self.end - self.begin}
        if whole := by_kind[ALL_READING]:
            values["reading begins"] = min(span.begin for span in whole) - self.begin
            values["reading ends"] = max(span.end for span in whole) - self.begin
        for kind in (HASH, READ, COPY):
            if spans := by_kind[kind]:
                values[f"first {kind} begins"] = min(span.begin for span in spans) - self.begin
                values[f"first {kind} ends"] = min(span.end for span in spans) - self.begin
                values[f"last {kind} ends"] = max(span.end for span in spans) - self.begin
        for kind in (HASH, READ, COPY, WAIT):
            if spans := by_kind[kind]:
                values[f"{kind}, all threads"] = sum(span.end - span.begin for span in spans)
                values[f"{kind}, processors"] = sum(span.processor_seconds for span in spans)
                values[f"{kind}, number of threads"] = len({span.thread for span in spans})
                values[f"{kind}, longest"] = max(span.end - span.begin for span in spans)
        return values

    def rows(self, kinds: tuple[str, ...] = (HASH, READ, COPY), columns: int = 100) -> list[str]:
        """A line for each kind: how many threads do it in each hundredth of the load: none `.`, 10 or more `+`."""
        width = (self.end - self.begin) / columns
        lines = []
        for kind in kinds:
            spans = [span for span in self.spans if span.kind == kind]
            if not spans:
                continue
            busy = [
                sum(max(0.0, min(span.end, left + width) - max(span.begin, left)) for span in spans)
                for left in (self.begin + number * width for number in range(columns))
            ]
            counts = [round(seconds / width) for seconds in busy]
            lines.append(f"{kind:<16} {''.join('.' if not n else '+' if n > 9 else str(n) for n in counts)}")
        return lines


def print_timelines(timelines: Sequence[Timeline]) -> None:
    """The medians of the summaries, and the rows of the load with the median time."""
    summaries = [timeline.summary() for timeline in timelines]
    for key in summaries[0]:
        print(f"  {key:<36} {statistics.median(summary.get(key, 0.0) for summary in summaries):8.3f}")
    middle = sorted(timelines, key=lambda timeline: timeline.end - timeline.begin)[len(timelines) // 2]
    print("\n".join(f"  {row}" for row in middle.rows()))
