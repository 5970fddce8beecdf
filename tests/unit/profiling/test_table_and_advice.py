"""The table of a profiled step, and the changes that a measurement suggests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.defaults import choices, with_choices
from megatron_wrap.config.reading.pipeline_layout import PipelineLayout
from megatron_wrap.config.schema import derived
from megatron_wrap.platform.base.machine import Machine
from megatron_wrap.profiling import kernel_kinds as kinds
from megatron_wrap.profiling.advice import ProfiledRun, StepMemory, memory_changes, promising_changes
from megatron_wrap.profiling.breakdown import StepBreakdown, Wait, Work
from megatron_wrap.profiling.step_profiler import ProfileReport, table_json, table_text

LLAMA = str(Path(__file__).parents[3] / "scripts" / "benchmark" / "llama-1b.yaml")
RUN = ProfiledRun(
    device="NVIDIA H200",
    transformer_engine_layers=True,
    has_transformer_engine=True,
    has_triton=True,
    can_pack=True,
    dp_size=1,
    num_microbatches=8,
    padding_share=0.0,
    product_flops=500e12,  # 632 ms at 791 TFLOP/s
    peak_gib=120.0,
    total_gib=139.0,
)


def _step(on_gpu: bool = True, exposed: dict[str, float] | None = None, **times: float) -> StepBreakdown:
    """A step of 1,000 ms; the time that `times` does not use is matmuls."""
    exposed = exposed or {}
    named = {name: times.get(name, 0.0) for name in kinds.KINDS} | {kinds.COMMUNICATION: sum(exposed.values())}
    named[kinds.MATMUL] = 1000.0 - sum(named.values())
    return StepBreakdown(named, 1000.0, 3, on_gpu, sum(exposed.values()), exposed, 5000, 0.0, (), ())


def _case(override: str, saves_ms: float, *overrides: str, run: dict[str, Any] | None = None, **times: Any) -> Any:
    """A suggested change and its time; the overrides, other facts and times of the profiled run."""
    return override, saves_ms, [*overrides], run or {}, times


LINEAR_CROSS_ENTROPY = "megatron_wrap.model_provider.linear_cross_entropy"
REDUCED, SENT = {"reduce-scatter": 60.0, "all-gather": 40.0}, {"send and receive": 100.0}
PARALLEL, DDP, MICRO = "megatron_lm.model.parallel", "megatron_lm.misc.ddp", "megatron_lm.train.common.micro_batch_size"
RECOMPUTE, IMPLEMENTATION = "megatron_lm.train.recompute.__select__", "megatron_lm.model.arch.transformer_impl"
DISTRIBUTED = "megatron_lm.train.optimizer.use_distributed_optimizer=true"
STAGES, LAYOUT = f"{PARALLEL}.pipeline_model_parallel_size=2", f"{PARALLEL}.pipeline_model_parallel_layout"
TENSOR, VIRTUAL = f"{PARALLEL}.tensor_model_parallel_size", f"{PARALLEL}.virtual_pipeline_model_parallel_size"
CHUNKS = f"{PARALLEL}.num_layers_per_virtual_pipeline_stage=1"
FASTER = {"faster_split": (PipelineLayout((10, 6), 2), 0.1)}
FREE, ONE = {"peak_gib": 50.0}, {"num_microbatches": 1}
CASES = {
    "data": _case("megatron_wrap.data.num_workers=2", 80.0, data=80.0),
    "idle": _case(f"{MICRO}=4", 60.0, run={**FREE, "product_flops": 800e12}, idle=60.0),
    "small matmuls": _case(f"{MICRO}=4", 1000 - 500e12 / 0.8 / 989e9, run=FREE),
    "reduction": _case(f"{DDP}.overlap_grad_reduce=true", 60.0, run={"dp_size": 2}, exposed=REDUCED),
    "gathering": _case(
        f"{DDP}.overlap_param_gather=true",
        40.0,
        *(f"{DDP}.overlap_grad_reduce=true", DISTRIBUTED),
        run={"dp_size": 2},
        exposed=REDUCED,
    ),
    "pipeline": _case(f"{VIRTUAL}=2", 60.0, STAGES, idle=20.0, exposed=SENT),
    "micro-batches": _case(f"{MICRO}=1", 60.0, STAGES, CHUNKS, idle=20.0, exposed=SENT),
    "split": _case(f"{PARALLEL}.pipeline_split=cost", 100.0, STAGES, f"{PARALLEL}.pipeline_split=even", run=FASTER),
    "numbers of layers": _case(f"{LAYOUT}=Et*10|t*6L", 100.0, STAGES, f"{LAYOUT}=Et|t*15L", run=FASTER),
    "tensor": _case(
        f"{TENSOR}=2", 100.0, f"{TENSOR}=4", f"{MICRO}=16", run={**FREE, **ONE}, exposed={"all-gather": 200.0}
    ),
    "loss": _case("pip install triton", 90.0, run={"has_triton": False}, loss=90.0),
    "recompute": _case(
        f"{RECOMPUTE}=none", 200.0, f"{RECOMPUTE}=full", run={"peak_gib": 90.0}, attention=200.0, idle=200.0
    ),
    "padding": _case("megatron_wrap.flow.packing=true", 270.0, run={"padding_share": 0.3}, optimizer=100.0),
    "implementation": _case(
        f"{IMPLEMENTATION}=transformer_engine",
        200.0,
        f"{IMPLEMENTATION}=torch",
        run={"transformer_engine_layers": False},
        elementwise=150.0,
        copies=50.0,
    ),
    "optimizer": _case(DISTRIBUTED, 60.0, run={"dp_size": 4}, optimizer=80.0),
    # a loop of two micro-batches in which nothing else applies
    "precision": _case("megatron_lm.train.dtype.fp8=hybrid", 300.0, run=ONE, idle=400.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_change_addresses_what_takes_longest(name: str) -> None:
    override, saves_ms, overrides, facts, times = CASES[name]
    change = promising_changes(_step(**times), read_run(LLAMA, overrides), replace(RUN, **facts))[0]
    assert (change.override, change.saves_ms) == (override, pytest.approx(saves_ms))
    if "=" in override:  # a configuration takes it
        changed = read_run(LLAMA, [*overrides, override])
        check_values(changed)
        check_layout(changed, derived.processes_needed(changed))


def test_two_changes_the_larger_first_and_new_numbers_last() -> None:
    step, config = _step(data=30.0, exposed=REDUCED), read_run(LLAMA, [])
    changes = promising_changes(step, config, replace(RUN, dp_size=2))
    assert [change.override.rpartition(".")[2] for change in changes] == ["overlap_grad_reduce=true", "num_workers=2"]
    changes = promising_changes(_step(data=30.0), config, RUN)
    assert [change.changes_numbers for change in changes] == [False, True]
    assert promising_changes(_step(data=9.0, on_gpu=False), config, RUN) == []


def test_what_the_defaults_chose_is_not_suggested() -> None:
    run, step = replace(RUN, dp_size=2), _step(exposed={"reduce-scatter": 60.0})
    config = read_run(LLAMA, [])
    machine = Machine("cpu", None, triton=False, weight_gradients=None)
    decided = with_choices(config, choices(config, machine, shards=2))
    assert promising_changes(step, config, run)[0].override.endswith("overlap_grad_reduce=true")
    assert not any("overlap_grad_reduce" in change.override for change in promising_changes(step, decided, run))


def test_the_table_has_rank_0_and_the_slowest() -> None:
    work = (Work("my_kernel", kinds.ELEMENTWISE, 2.0, 12.5, recognized=False),)
    ranks = (_step(idle=100.0), _step(exposed=REDUCED), replace(_step(), work=work))
    config = read_run(LLAMA, [])
    changes = tuple(promising_changes(_step(data=50.0), config, RUN))
    memory = tuple(memory_changes([StepMemory(61.2, 0.0), StepMemory(78.8, 15.655), StepMemory(60.0, 0.0)]))
    title = "llama-1b (cuda, tp1 pp1 cp1 dp3)"
    report = ProfileReport((6, 7, 8), ranks, 990.0, 512.3, 61.2, 0.25, changes, memory, title)
    shown = table_text(report).splitlines()
    assert report.slowest == 2
    assert shown[0] == f"{title}, iterations 6 to 8"
    assert "rank 2 (slowest)" in shown[1]
    assert shown[2].split() == ["matmuls", "900.0", "ms", "90.0%", "1,000.0", "ms", "100.0%"]
    assert any("12.5 ms, such as my_kernel" in line for line in shown)
    assert any("25% padding" in line for line in shown)
    assert any("50.0 ms (5.0%)" in line for line in shown)
    assert shown[-3:-1] == [f"1. {LINEAR_CROSS_ENTROPY}=true", "   could save at most 15.7 of 78.8 GiB"]
    assert table_json(report)["memory_changes"][0]["saves_gib"] == 15.655
    assert table_json(report)["ranks"][1]["exposed_collectives"] == REDUCED


def test_the_longest_waits_of_the_gpu_that_is_idle_longest() -> None:
    waits = (
        Wait("optimizer", "data of the next step", 1.0, 8.06, late_ms=8.0),
        Wait("k" * 90, "nvjet_tst_192x192", 4.0, 3.0, late_ms=0.4),
        Wait("any kernel", "the next, below 6 us each", 3900.0, 2.0, late_ms=0.0),
        Wait("loss", "loss", 2.0, 0.1, late_ms=0.1),
    )

    def lines(*ranks: StepBreakdown) -> list[str]:
        shown = table_text(ProfileReport((6, 7), ranks, 990.0, 512.3, 61.2, 0.0, (), (), "title")).splitlines()
        starts = [index for index, line in enumerate(shown) if line.startswith("longest waits")]
        return shown[starts[0] : shown.index("", starts[0])] if starts else []

    idle, late = _step(idle=9.9), replace(_step(idle=13.0), waits=waits)
    header, *rows = lines(late, idle)  # rank 1 computes longer, and waits for rank 0
    assert "rank 0" in header
    assert [row.split()[:4] for row in rows] == [
        ["8.1", "ms", "1.0", "times"],
        ["3.0", "ms", "4.0", "times"],
        ["2.0", "ms", "3,900.0", "times"],
    ]
    assert ["Python" in row for row in rows] == [True, False, False]
    assert "optimizer -> data of the next step" in rows[0]
    assert all(len(row) <= 160 for row in rows)
    assert "rank" not in lines(late)[0]
    assert lines(replace(idle, waits=waits)) == lines(_step(idle=20.0, on_gpu=False)) == []


def test_memory_is_saved_where_logits_are_a_share_of_it() -> None:
    assert memory_changes([StepMemory(78.8, 0.0)]) == []  # linear_cross_entropy is on, or the model needs the logits
    assert memory_changes([StepMemory(78.8, 0.7)]) == []
    (change,) = memory_changes([StepMemory(78.8, 0.8)])
    assert read_run(LLAMA, [change.override]).model_provider.linear_cross_entropy is True
