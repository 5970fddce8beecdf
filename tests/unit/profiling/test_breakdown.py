"""The time of a step divided among kinds of work, compared with a raster and with torch's own self times, and of the
trace of a GPU."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from _traces import MAIN, event

from megatron_wrap.metrics import phases
from megatron_wrap.profiling import kernel_kinds as kinds
from megatron_wrap.profiling.breakdown import as_json, break_down, divided
from megatron_wrap.profiling.trace import read_timeline, timeline_of

AUTOGRAD, WATCHDOG = 8, 9


def test_every_moment_belongs_to_the_first_label_with_a_span_there() -> None:
    chance, priority = random.Random(0), ("a", "b", "c")
    for _ in range(20):
        spans = []
        for _ in range(12):
            start = chance.randrange(-5, 60)
            spans.append((chance.choice(priority), start, start + chance.randrange(20)))
        raster = dict.fromkeys((*priority, None), 0)
        for moment in range(50):
            here = [label for label, start, end in spans if start <= moment < end]
            raster[min(here, default=None)] += 1
        assert divided(spans, 0, 50, priority) == raster


def _kernel(name: str, launched: float, start: float, end: float, number: int, thread: int = MAIN) -> list[Any]:
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread, correlation=number),
        event("kernel", name, start, end, 0, correlation=number),
    ]


def _link(number: int, forward: tuple[int, float], backward: tuple[int, float]) -> list[Any]:
    ends = (("s", forward), ("f", backward))
    return [{"ph": ph, "cat": "fwdbwd", "id": number, "tid": thread, "ts": start} for ph, (thread, start) in ends]


def test_a_trace_of_a_gpu() -> None:
    events = [
        event("user_annotation", "ProfilerStep#4", 0, 1000),
        event("user_annotation", phases.DATA, 0, 100),
        event("user_annotation", f"{phases.COMPUTED_TOKENS}512", 90, 95),
        *_kernel("Memcpy HtoD (Pinned -> Device)", 20, 40, 50, 1),  # 10 of copies within the wait for data
        *_kernel("nvjet_tst_192x192", 110, 120, 320, 2),
        *_kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 111, 300, 400, 3),  # 80 of 100 exposed
        event("user_annotation", phases.LOSS, 130, 160),
        event("cpu_op", "TokenLogProbs", 140, 150),
        *_kernel("void at::native::vectorized_elementwise_kernel<4>", 145, 400, 420, 4),
        event("cpu_op", "TokenLogProbsBackward", 200, 230, AUTOGRAD),
        *_kernel("_log_prob_gradient_kernel", 210, 420, 450, 5, AUTOGRAD),
        *_kernel(last := "nvjet_of_the_output_layer", 215, 470, 480, 9, AUTOGRAD),  # with linear_cross_entropy
        *_link(1, (MAIN, 140), (AUTOGRAD, 200)),
        event("cpu_op", "MulBackward0", 240, 260, AUTOGRAD),
        *_kernel("my_kernel", 250, 450, 470, 6, AUTOGRAD),
        *_link(2, (MAIN, 170), (AUTOGRAD, 240)),
        event("user_annotation", "Optimizer.step#FusedAdam.step", 500, 600),
        *_kernel("void at::native::vectorized_elementwise_kernel<4>", 510, 600, 700, 7),
        *_kernel("nvjet_tst_192x192", 990, 1010, 1100, 8),  # of the next step
    ]
    breakdown = break_down(timeline_of(events))
    assert {kind: round(1e3 * time) for kind, time in breakdown.milliseconds.items()} == {
        kinds.MATMUL: 210,
        kinds.ATTENTION: 0,
        kinds.COMMUNICATION: 80,
        kinds.OPTIMIZER: 100,
        kinds.LOSS: 50,
        kinds.ELEMENTWISE: 20,
        kinds.COPIES: 10,
        kinds.DATA: 90,
        kinds.IDLE: 440,
    }
    assert (breakdown.on_gpu, breakdown.num_kernels, breakdown.computed_tokens) == (True, 8, 512)
    assert breakdown.communication_ms == pytest.approx(0.1)
    assert breakdown.exposed_collectives == {"reduce-scatter": pytest.approx(0.08)}
    assert breakdown.busy_ms == pytest.approx(0.39)
    waits = [(wait["before"], wait["after"]) for wait in as_json(breakdown)["waits"]]
    assert waits == [("optimizer", "end of the profile"), (last, "optimizer"), ("data", "nvjet_tst_192x192")]
    unknown = [work for work in as_json(breakdown)["kernels"] if not work["recognized"]]
    assert [(work["name"], work["kind"]) for work in unknown] == [("my_kernel", kinds.ELEMENTWISE)]


def test_waiting_for_gloo_is_exposed_also_within_an_autograd_function() -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("cpu_op", "_ReduceFromModelParallelRegion", 0, 60),
        event("cpu_op", "c10d::allreduce_", 10, 15),
        event("user_annotation", "gloo:all_reduce", 12, 50, WATCHDOG),
        event("cpu_op", "aten::mul", 40, 48),
        event("cpu_op", "aten::mm", 70, 90),
    ]
    breakdown = break_down(timeline_of(events))
    times = {kind: round(1e3 * time) for kind, time in breakdown.milliseconds.items() if time}
    assert times == {kinds.COMMUNICATION: 32, kinds.ELEMENTWISE: 8, kinds.MATMUL: 20, kinds.IDLE: 40}
    assert breakdown.waits == ()


def test_matmuls_within_the_loss_are_matmuls() -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("user_annotation", phases.LOSS, 0, 60),
        event("cpu_op", "aten::cross_entropy_loss", 0, 50),
        event("cpu_op", "aten::mm", 10, 40),
        event("cpu_op", "aten::copy_", 20, 25),
        event("user_annotation", phases.OPTIMIZER, 60, 100),  # Muon's products are the optimizer's
        event("cpu_op", "aten::mm", 60, 90),
    ]
    times = {kind: round(1e3 * time) for kind, time in break_down(timeline_of(events)).milliseconds.items() if time}
    assert times == {kinds.MATMUL: 30, kinds.LOSS: 20, kinds.OPTIMIZER: 30, kinds.IDLE: 20}


def test_a_trace_without_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="ProfilerStep"):
        break_down(timeline_of([event("cpu_op", "aten::mm", 0, 1)]))


def test_times_of_operations_are_those_of_torch(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile, torch.profiler.record_function("ProfilerStep#0"):
        model(torch.randn(32, 64)).softmax(-1).square().sum().backward()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    breakdown = break_down(read_timeline(tmp_path / "trace.json.gz"))
    ours = {work.name: work.milliseconds for work in breakdown.work}
    theirs = {each.key: each.self_cpu_time_total / 1e3 for each in profile.key_averages()}
    for name in ("aten::addmm", "aten::mm", "aten::silu", "aten::silu_backward", "aten::_softmax", "aten::sum"):
        assert ours[name] == pytest.approx(theirs[name], abs=2e-3), name
    assert sum(breakdown.milliseconds.values()) == pytest.approx(breakdown.step_ms)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
