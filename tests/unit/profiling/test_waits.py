"""Waits of a GPU in synthetic traces: what ran before and after, how long, and whether the host was late; together they
are the idle time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from _traces import event

from megatron_wrap.metrics import phases
from megatron_wrap.profiling import kernel_kinds as kinds
from megatron_wrap.profiling.breakdown import Wait, break_down, waits_of
from megatron_wrap.profiling.trace import timeline_of


def _trace(steps: list[tuple[float, float]], kernels: list[tuple[str, float | None, float, float]]) -> list[Any]:
    """Of kernels (name, launched, start, end)."""
    events = [event("user_annotation", f"ProfilerStep#{number}", *step) for number, step in enumerate(steps)]
    for number, (name, launched, start, end) in enumerate(kernels):
        if launched is not None:
            events.append(event("cuda_runtime", "cudaLaunchKernel", launched, launched + 3, correlation=number))
        events.append(event("kernel", name, start, end, correlation=number))
    return events


def _waits(events: list[Any]) -> dict[tuple[str, str], Wait]:
    return {(wait.before, wait.after): wait for wait in waits_of(timeline_of(events))}


@pytest.mark.parametrize(
    ("launched", "late_ms", "host_was_late"),
    [
        (100, 0.0, False),  # in the queue since long before: it waited for another stream
        (1985, 0.0, False),
        (1996, 0.006, False),  # launched within the launch latency
        (2490, 0.5, False),  # half of the time
        (2600, 0.61, True),
        (2999, 1.0, True),
        (None, 0.0, False),  # not in the trace
    ],
)
def test_the_host_was_late_if_it_launched_after_the_wait_began(
    launched: float | None, late_ms: float, host_was_late: bool
) -> None:
    kernels = [("first", 0.0, 0.0, 2000.0), ("second", launched, 3000.0, 4000.0)]
    (wait,) = _waits(_trace([(0, 4000)], kernels)).values()
    assert (wait.before, wait.after, wait.count, wait.milliseconds) == ("first", "second", 1.0, pytest.approx(1.0))
    assert (wait.late_ms, wait.host_was_late) == (pytest.approx(late_ms), host_was_late)


def test_waits_between_the_same_kernels_are_added_up_and_the_longest_come_first() -> None:
    kernels: list[tuple[str, float | None, float, float]] = []
    for step in (0, 10_000):
        kernels += [
            ("void ns::a<1>(int)", step, step, step + 1000),
            ("b", step + 900, step + 1100, step + 2000),  # 100 after a
            ("b", step + 900, step + 2003, step + 4000),  # 3: no longer than between any two kernels
            ("void ns::a<2>(int)", step + 901, step + 4400, step + 5000),  # 400 after b
            ("b", step + 902, step + 5100, step + 7000),  # 100 after a
            ("other_stream", step + 902, step + 6900, step + 9000),  # b ends within it
            ("ncclDevKernel_AllGather_RING_LL(Args<4096ul>)", step + 903, step + 9150, step + 10_000),
        ]
    waits = waits_of(timeline_of(_trace([(0, 10_000), (10_000, 20_000)], kernels)))
    assert [(wait.before, wait.after, wait.count, round(1e3 * wait.milliseconds)) for wait in waits] == [
        ("b", "a", 1.0, 400),
        ("a", "b", 2.0, 200),
        ("other_stream", "all-gather", 1.0, 150),
        ("any kernel", "the next, below 6 us each", 1.0, 3),
    ]


def test_between_steps() -> None:
    """The step of a kernel is the one that launched it; the wait for a batch is no idle time and parts a wait."""
    kernels = [
        ("embedding", 200.0, 250.0, 500.0),
        ("adam", 310.0, 600.0, 800.0),
        ("embedding", 1200.0, 1300.0, 1500.0),
        ("adam", 1100.0, 1500.0, 1900.0),
        ("embedding", 1950.0, 2100.0, 2300.0),  # launched in the step before, which the host ends first
        ("adam", 2050.0, 2300.0, 2600.0),
        ("memset", 3100.0, 3200.0, 3300.0),
    ]
    events = _trace([(0, 900), (900, 2000), (2000, 3000), (3000, 4000)], kernels)
    events.append(event("user_annotation", phases.OPTIMIZER, 300, 320))
    waits = _waits([*events, event("user_annotation", phases.DATA, 1000, 1150)])
    assert {names: round(4e3 * wait.milliseconds) for names, wait in waits.items()} == {
        ("start of the profile", "embedding"): 250,
        ("embedding", "optimizer"): 100,
        ("optimizer", "data of the next step"): 200,
        ("data", "embedding"): 150,
        ("optimizer", "embedding"): 200,
        ("optimizer", "first kernel of the next step"): 600,
        ("memset", "end of the profile"): 700,
    }
    assert waits["optimizer", "first kernel of the next step"].count == 1 / 4
    assert waits["optimizer", "first kernel of the next step"].host_was_late
    assert waits["memset", "end of the profile"].host_was_late


def test_the_waits_are_the_idle_time() -> None:
    chance = random.Random(0)
    for _ in range(20):
        kernels = [
            (chance.choice(["a", "b", "nccl"]), start - chance.randrange(50), start, start + chance.randrange(1, 60))
            for start in (chance.randrange(-50, 1100) for _ in range(20))
        ]
        steps = [(0.0, 300.0), (310.0, 700.0), (700.0, 1000.0)]  # with a pause that is in no step
        data = event("user_annotation", phases.DATA, begin := chance.randrange(900), begin + 100)
        breakdown = break_down(timeline_of([*_trace(steps, kernels), data]))
        assert sum(wait.milliseconds for wait in breakdown.waits) == pytest.approx(breakdown.milliseconds[kinds.IDLE])
        assert all(0 <= wait.late_ms <= wait.milliseconds + 1e-9 for wait in breakdown.waits)
