"""The parts of scripts/benchmark/compare.py that measure nothing; tests/end_to_end/test_compare.py runs it."""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "benchmark"


@pytest.fixture(autouse=True)
def path_of_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def _task(*overrides: str, world_size: int = 1) -> Any:
    from comparison.task import task_of

    path = str(FOLDER / "llama-1b.yaml")
    return task_of(read_run(path, overrides), path, overrides, "cpu", world_size, warmup=1, steps=2)


def test_all_programs_get_the_run_and_one_formula() -> None:
    task = _task("megatron_lm.train.common.micro_batch_size=4", world_size=2)
    assert (task.num_microbatches, task.tokens_per_step, task.kv_channels) == (2, 16 * 4096, 64)
    # the formula of shared measurements: 6 FLOPs per weight and token, and causal attention
    weights = 16 * (2 * 2048 * 2048 + 2 * 2048 * 8 * 64 + 3 * 2048 * 8192) + 2048 * 128256
    flops = task.tokens_per_step * (6 * weights + 6 * 16 * 4096 * 2048)
    assert task.tflops(2.0) == pytest.approx(flops / 2.0 / 2 / 1e12)


def test_processes_that_share_a_replica_take_its_micro_batches() -> None:
    parallel = "megatron_lm.model.parallel."
    sizes = (f"{parallel}tensor_model_parallel_size=2", f"{parallel}pipeline_model_parallel_size=2")
    task = _task(*sizes, world_size=8)
    assert (task.model_parallel, task.num_replicas, task.num_microbatches) == (4, 2, 4)


def test_an_adapter_and_packed_samples_of_mixed_lengths() -> None:
    from comparison.presets import PRESETS

    task = _task(*PRESETS["8b-lora-mixed"].overrides, "megatron_lm.train.common.seq_length=512")
    assert (task.lora_rank, task.lora_alpha, task.mixed_lengths) == (16, 32, True)
    lengths = [len(sample) - 1 for sample in task.samples()]
    assert lengths == task.sample_lengths * 3  # the same in each step
    assert (len(set(lengths)) > 9, max(lengths), task.tokens_per_step) == (True, 512, sum(lengths) // 3)
    # 4 FLOPs per frozen weight and token, 6 per weight of a factor; the first layer's inputs need no gradient
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 8 * 128 + 3 * 4096 * 14336) + 4096 * 128256
    factors = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    first = 4096 * (4096 + 2 * 1024) + 3 * 16 * 4096
    attention = 6 * 32 * 4096 * sum(length**2 for length in task.sample_lengths)
    expected = (4 * weights + 6 * factors - 2 * first) * task.tokens_per_step + attention
    assert task.tflops(1.0) == pytest.approx(expected / 1e12)


def test_tokens_are_the_same_for_each_program_and_skewed() -> None:
    task = _task("megatron_lm.train.common.seq_length=64")
    rows = task.token_rows()
    assert rows.shape == (3 * 16, 65)
    assert (rows == task.token_rows()).all()
    assert (rows.min(), rows.max() < 128256) == (0, True)
    assert 0.02 < (rows == 0).mean() < 0.1  # 1 / log2(V) = 1/17 of all: rank 1 of frequencies that fall as 1 / rank


@pytest.mark.parametrize(
    ("overrides", "world_size", "named"),
    [
        (["megatron_wrap.adapter.__select__=lora", "megatron_wrap.adapter.bias=all"], 1, "adapter.bias 'all'"),
        (["megatron_lm.model.arch.hidden_dropout=0.1"], 1, "hidden_dropout 0.1"),
        (["megatron_lm.model.parallel.context_parallel_size=2"], 3, "2 processes share the model, and there are 3"),
        (["megatron_lm.train.common.micro_batch_size=8"], 4, "16 is no multiple of micro_batch_size 8 on 4 replicas"),
    ],
)
def test_a_run_that_the_programs_do_not_share_is_refused(overrides: list[str], world_size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _task(*overrides, world_size=world_size)


def test_the_search_keeps_what_is_faster_and_records_the_rest() -> None:
    from comparison.flags import Flags, changed, changes, fastest

    def seconds_of(name: str, flags: Flags) -> float | str:
        if flags.implementation == "local":
            return "OutOfMemoryError: out of memory"
        return (
            2.0
            - 0.3 * (flags.cross_entropy == "te")
            - 0.2 * (flags.cross_entropy == "native")
            + 0.1 * (not flags.rope_fusion)
        )

    start = Flags("transformer_engine", rope_fusion=True)
    task = dataclasses.replace(_task("megatron_lm.train.common.seq_length=2048", world_size=2), platform="cuda")
    known = changed(start, ["Transformer Engine's cross-entropy", "unfused rotary embedding"], task)
    assert known == Flags("transformer_engine", cross_entropy="te")
    with pytest.raises(ConfigError, match="'local layer' is no change of these flags"):
        changed(start, ["local layer"], task)
    best, records = fastest(start, changes(start, task), seconds_of)
    assert best == Flags("transformer_engine", cross_entropy="te", rope_fusion=True)
    assert records[0]["step_seconds"] == 2.0
    assert [record["change"] for record in records if "error" in record] == ["local layers"]
    assert {"overlapped communication", "fused weight gradients"} <= {record["change"] for record in records}


def _report(ours: float, memory: float = 10.0, bare: float = 100.0) -> dict[str, Any]:
    def program(speed: float, peak: float) -> dict[str, Any]:
        return {
            "tokens_per_second_per_device": speed,
            "step_seconds": 1 / speed,
            "round_step_seconds": [1 / speed],
            "tflops": speed,
            "peak_memory_gib": peak,
            "first_loss": 9.0,
            "last_loss": 8.0,
            "notes": "",
        }

    programs = {
        "ours": program(ours, memory),
        "bare": program(bare, 10.0),
        "trl": {"error": "OutOfMemoryError: 80 GiB"},
    }
    preset = {"description": "sizes.", "programs": programs, "sweep": []}
    return {
        "date": "2026-01-01",
        "hardware": "1 x GPU",
        "versions": {},
        "command": "python x",
        "presets": {"1.5b-4096": preset},
    }


@pytest.mark.parametrize(
    ("new", "count"),
    [
        (_report(104.0), 0),
        (_report(52.0, bare=50.0), 0),  # everything is slower that day
        (_report(95.0), 1),
        (_report(104.0, memory=10.5), 1),
    ],
)
def test_regressions_are_of_the_ratio_and_of_memory(new: dict[str, Any], count: int) -> None:
    from comparison.report import regressions

    lines, result = regressions(new, _report(104.0), threshold=0.02)
    assert result == count
    assert sum("REGRESSION" in line for line in lines) == count
    broken = copy.deepcopy(new)
    broken["presets"]["1.5b-4096"]["programs"]["ours"] = {"error": "NanError"}
    assert regressions(broken, _report(104.0), threshold=0.02)[1] == 1


def test_the_table() -> None:
    from comparison.report import markdown

    text = markdown(_report(104.0))
    assert "| ours | 104 | 1.040 | 104 |" in text
    assert "| trl | OutOfMemoryError: 80 GiB |" in text
    variant = _report(104.0)
    programs = variant["presets"]["1.5b-4096"]["programs"]
    programs["ours-x"] = _report(52.0)["presets"]["1.5b-4096"]["programs"]["ours"]
    assert "ours-x over ours: 0.5000" in markdown(variant)
    del programs["ours"]  # --only-variants
    assert "| ours-x | 52 | 0.520 | 52 |" in markdown(variant)
    del programs["bare"]  # --against ""
    assert "| tokens/s per device | over |" in markdown(variant)


@pytest.mark.parametrize("rope_fusion", [True, False])
def test_bare_loop_gets_the_sizes_of_deepseek(rope_fusion: bool) -> None:
    from comparison.flags import Flags
    from comparison.presets import PRESETS
    from comparison.task import task_of
    from comparison.with_megatron_core import _transformer_config

    preset = PRESETS["deepseek-v3-layers-balanced"]
    path = str(FOLDER / preset.config)
    task = task_of(read_run(path, preset.overrides), path, preset.overrides, "cuda", 1, warmup=1, steps=2)
    config = _transformer_config(task, Flags("transformer_engine", rope_fusion=rope_fusion))
    assert (config.kv_lora_rank, config.moe_router_num_groups, config.moe_shared_expert_intermediate_size) == (
        512,
        8,
        640,
    )
    assert config.moe_router_force_load_balancing
    assert config.moe_router_enable_expert_bias
    # 6 FLOPs per weight and token, and causal attention of 192 and 128 per head
    attention = 768 * (2048 + 32 * 192) + 2048 * (512 + 64) + 512 * 32 * 256 + 32 * 128 * 2048
    weights = 8 * (attention + 2048 * (9 * 640 * 3 + 128)) + 2048 * 129280
    flops = task.tokens_per_step * (6 * weights + 3 * 8 * 4096 * 32 * (192 + 128))
    assert task.tflops(1.0) == pytest.approx(flops / 1e12)


@pytest.mark.process_group
def test_the_bare_loop_splits_rows_as_context_parallelism_has_them() -> None:
    import torch
    from comparison.with_megatron_core import part_of_this_rank
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_wrap.platform import choose_platform

    choose_platform("cpu").install()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=2, create_gloo_process_groups=False)
    tokens = torch.arange(24).view(2, 12)
    part = part_of_this_rank({"tokens": tokens, "positions": torch.arange(12).expand(2, -1)})
    assert part["tokens"].tolist() == [[3, 4, 5, 6, 7, 8], [15, 16, 17, 18, 19, 20]]
    assert part["positions"].tolist() == [[3, 4, 5, 6, 7, 8]] * 2


_WORKER = """
import faulthandler, json, os, signal, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
def say(message):
    print("@compare " + json.dumps(message), flush=True)
say({"ready": ""})
for line in sys.stdin:
    order = json.loads(line)
    does = order["options"]["does"]
    if os.environ["LOCAL_RANK"] == "1":
        if does == "fail":
            say({"error": "OutOfMemoryError: 80 GiB"})
        if does == "end":
            sys.exit(1)
    if does != "train":
        time.sleep(60)
    answer = {"step_seconds": [order["port"]], "peak_memory_gib": order["rank"], "left_gib": 0.0}
    say({**answer, "losses": [], "notes": str(os.getpid())})
"""
"""The protocol of `comparison.worker`, without torch."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts" / "benchmark" / "comparison"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "worker.py").write_text(_WORKER)
    return tmp_path


@pytest.mark.parametrize(
    ("does", "message"),
    [("hang", "no answer within 1 s"), ("fail", "OutOfMemoryError: 80 GiB"), ("end", "its process ended")],
)
def test_processes_on_standby_train_after_a_run_that_failed(tree: Path, does: str, message: str) -> None:
    from comparison.pool import Launch, Programs

    task = _task(world_size=2)
    with Programs({"ours": Launch("", tree)}, 2, "cpu", tree / "logs", standby=True) as programs:
        first = programs["ours"].run(task, {"does": "train"}, 60)
        begun = time.monotonic()
        assert programs["ours"].run(task, {"does": does}, 1)["error"].startswith(message)
        again = programs["ours"].run(task, {"does": "train"}, 60)
    assert time.monotonic() - begun < 30
    assert (first["peak_memory_gib"], again["peak_memory_gib"]) == (1, 1)
    assert first["notes"] != again["notes"]
    logs = [path.read_text() for path in (tree / "logs").iterdir()]
    assert sum("worker.py" in log for log in logs) == (2 if does == "hang" else 0)  # the stacks of both


def test_a_task_of_one_device_trains_on_each(tree: Path) -> None:
    from comparison.pool import Launch, Programs

    with Programs({"ours": Launch("", tree)}, 2, "cpu", tree / "logs") as programs:
        both = programs["ours"].run(_task(world_size=2), {"does": "train"}, 60)
        each = programs["ours"].run(_task(world_size=1), {"does": "train"}, 60)
    assert (both["peak_memory_gib"], each["peak_memory_gib"]) == (1, 0)  # the largest rank
    ports = [float(text) for text in each["notes"].rpartition(": ")[2].removesuffix(" s").split(", ")]
    assert len(ports) == 2
    assert each["step_seconds"] == [pytest.approx(sum(ports) / 2, rel=1e-3)]


def test_lines_of_a_file_are_tasks_with_the_defaults_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comparison.arguments import parse, runs_of

    (tmp_path / "tasks").write_text(
        "one: tiny --devices 1 a.b=2 --variant 'ours-x: a.c=1 a.d=2' --only-variants\nboth: 1.5b-4096 --rounds 2\n"
    )
    command = ["compare.py", "--tasks", str(tmp_path / "tasks"), "a.b=1", "--devices", "2", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", command)
    _, tasks = parse("")
    one_device, two_devices = tasks["one"], tasks["both"]
    assert (one_device.preset, one_device.devices, one_device.rounds, one_device.overrides) == (
        "tiny",
        1,
        1,
        ["a.b=1", "a.b=2"],
    )
    assert (two_devices.preset, two_devices.devices, two_devices.rounds, two_devices.overrides) == (
        "1.5b-4096",
        2,
        2,
        ["a.b=1"],
    )
    assert {name: overrides for name, (_, _, overrides) in runs_of(one_device).items()} == {
        "ours-x": ["a.c=1", "a.d=2"]
    }
    assert list(runs_of(two_devices)) == ["ours"]
    (tmp_path / "tasks").write_text("one: a.b=2\n")
    with pytest.raises(SystemExit):
        parse("")
