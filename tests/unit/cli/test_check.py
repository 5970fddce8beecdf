"""`megatron-wrap check` reports what `megatron-wrap train` refuses, with the same messages, all at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.checkpoint.files.run_folder import CheckpointStore
from megatron_wrap.cli.main import main
from megatron_wrap.config import load_run_config, write_resolved
from megatron_wrap.core import MegatronWrap
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.launch import local

RUN = (
    (Path(__file__).parents[1] / "small_run.yaml").read_text(encoding="utf-8")
    + """\
  data: {__select__: jsonl, __override__: {train: train.jsonl}}
"""
)
GOOD_ROW = '{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n'
OUTSIDE = '{"input_ids": [1, 2, 60], "loss_mask": [0, 1, 1]}\n'
"""The last token, which is a label and no input, is above the vocabulary of 60."""
ARCH, TRAIN, RATE = "megatron_lm.model.arch", "megatron_lm.train.common", "megatron_lm.train.learning-rate"
ADAPTER = "megatron_wrap.adapter"
LORA = f"{ADAPTER}.__select__=lora"
PARALLEL, DATA, FLOW = "megatron_lm.model.parallel", "megatron_wrap.data", "megatron_wrap.flow"


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory contains run.yaml and its data."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Path("train.jsonl").write_text(GOOD_ROW * 8)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)


def save_checkpoint(folder: str, iteration: int, vocab_size: int = 60) -> None:
    """The files of a checkpoint that are read before a process starts."""
    store = CheckpointStore(folder)
    partial = store.begin(iteration)
    (partial / ".metadata").write_text("tensor metadata")
    (partial / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    write_resolved(load_run_config("run.yaml"), partial / "resolved.yaml")
    store.commit(partial, iteration, {"vocab_size": vocab_size})


def save() -> None:
    save_checkpoint("saved", 2)


def write_rows(text: str) -> Callable[[], object]:
    return lambda: Path("train.jsonl").write_text(text)


OFFLOADING = [f"{ARCH}.cpu_offloading=true", f"{ARCH}.cpu_offloading_num_layers=5"]
SAVED, LONG = f"{TRAIN}.save=saved", '{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}\n'
FAULTS: list[tuple[Any, ...]] = [
    ("configuration", [f"{TRAIN}.micro_batch_sise=2"], "did you mean micro_batch_size"),
    ("configuration", [f"{TRAIN}.train_iters=ten"], "train_iters"),
    ("configuration", [f"{TRAIN}.seq_length=0"], "at least 1, not 0"),
    ("configuration", [f"{TRAIN}.train_epochs=2"], "train_iters 6 and train_epochs 2"),
    ("configuration", [f"{TRAIN}.global_batch_size=5"], "nearest legal sizes: 4 and 6"),
    ("configuration", [f"{PARALLEL}.tensor_model_parallel_size=3"], "legal sizes for this model: 1, 2"),
    ("configuration", [f"{ARCH}.transformer_impl=transformer_engine"], "platform auto or cuda"),
    ("configuration", [f"{RATE}.lr_warmup_iters=6"], "warm-up of 6"),
    ("data files", [f"{DATA}.train=trian.jsonl"], "did you mean train.jsonl?"),
    ("folders", [f"{DATA}.tokenizer=none"], "no tokenizer folder 'none'"),
    ("folders", [f"{TRAIN}.load=none"], "no checkpoint folder 'none'"),
    ("folders", ["megatron_wrap.logger.output_dir=run.yaml"], "is a file"),
    ("layout", ["--nproc-per-node=3"], "nearest legal sizes: 6"),
    ("layout", ["--nproc-per-node=3", f"{PARALLEL}.tensor_model_parallel_size=2"], "start a multiple of 2"),
    ("data", [], "train.jsonl:2: not JSON", write_rows(f"{GOOD_ROW}{{broken\n")),
    ("data", [], "no samples", write_rows("")),
    ("checkpoint", [SAVED, f"{ARCH}.ffn_hidden_size=96"], "was 64", save),
    ("checkpoint", [f"{TRAIN}.load=old"], "old torch format", lambda: Path("old/mp_rank_00").mkdir(parents=True)),
    ("learning-rate schedule", [SAVED, f"{TRAIN}.train_iters=9"], "was 6 (24 samples) and is 9 (36 samples)", save),
    ("learning-rate schedule", [SAVED, "megatron_wrap.checkpoint.resume=never"], "resume is never", save),
    ("reference model", ["megatron_wrap.models.reference={checkpoint: here}"], "contains no checkpoint"),
    ("flow", [f"{FLOW}.flow_key=gpt_stf"], "gpt_stf"),
    ("flow", [f"{FLOW}.loss_on=user"], "must be one of assistant"),
    ("adapter", [LORA, f"{ADAPTER}.target_modules=[q_prj]"], "did you mean q_proj?"),
    ("adapter", [LORA, f"{ADAPTER}.path=here"], "here/adapter_config.json: cannot be read"),
    ("sample lengths", [f"{FLOW}.truncation=refuse", f"{TRAIN}.seq_length=2"], "train.jsonl:1: ", write_rows(LONG)),
]
"""Name of the validation, arguments, part of its message, and what is done before if there is something."""


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, str]]:
    """(name, message) of each error of a check."""
    assert main(["check", "run.yaml", "--json", *arguments]) == 2
    items = json.loads(capsys.readouterr().out)
    return [(item["name"], item["text"]) for item in items if item["status"] == "error"]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault[2] for fault in FAULTS])
def test_check_and_train_report_the_same(
    fault: tuple[Any, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arguments, part, *prepare = fault
    for function in prepare:
        function()
    monkeypatch.setattr(local, "launch_processes", lambda *_: pytest.fail("processes were started"))
    files = sorted(Path().rglob("*"))
    assert main(["train", "run.yaml", *arguments]) == 2
    message = capsys.readouterr().err.removeprefix("error: ").rstrip("\n")
    assert part in message
    assert errors(capsys, *arguments)[0] == (name, message)
    assert sorted(Path().rglob("*")) == files


@pytest.mark.process_group
@pytest.mark.parametrize(
    ("name", "arguments", "part", "text"),
    [
        ("first rows", [], "train.jsonl:2: ", GOOD_ROW + '{"inputs": [1]}\n' + GOOD_ROW * 2),
        ("first rows", [], "train.jsonl:1: ", '{"messages": [{"role": "user", "content": "a"}]}\n' * 4),
        ("first rows", [], "train.jsonl:2: the sample has the token id 60, but", GOOD_ROW + OUTSIDE + GOOD_ROW * 2),
        ("tokenizer", [f"{TRAIN}.load=saved", f"{TRAIN}.finetune=true"], "61 rows there and 60 here", GOOD_ROW * 8),
        ("platform", ["megatron_wrap.logger.metric_loggers=[csv]"], "csv", GOOD_ROW * 8),
        ("platform", OFFLOADING, "Megatron-Core rejects", GOOD_ROW * 8),
    ],
)
def test_check_finds_what_the_processes_find_while_they_set_up(
    name: str, arguments: list[str], part: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint("saved", 2, vocab_size=61)
    Path("train.jsonl").write_text(text)
    of_check = errors(capsys, *arguments)
    with MegatronWrap("run.yaml", arguments) as wrap:
        wrap.initialize()
        with pytest.raises(MegatronWrapError, match=re.escape(part)) as raised:
            wrap.setup_model_and_optimizer()
    assert of_check[0] == (name, str(raised.value))


def test_independent_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each key, value, file and row; what needs a corrected one is named as not checked."""
    keys = errors(capsys, f"{TRAIN}.micro_batch_sise=2", f"{ARCH}.num_layerz=2", "nothing=1")
    assert [name for name, _ in keys] == ["configuration"] * 3
    types = errors(capsys, f"{TRAIN}.train_iters=ten", f"{ARCH}.hidden_size=wide")
    assert [name for name, _ in types] == ["configuration"] * 2
    Path("train.jsonl").write_text('{"input_ids": 3}\n{broken\n{"text": "x"}\n' + GOOD_ROW)
    values = [f"{TRAIN}.train_epochs=2", f"{TRAIN}.global_batch_size=5", f"{FLOW}.loss_on=user"]
    paths = [f"{DATA}.validation=none.jsonl", f"{DATA}.tokenizer=none"]
    assert [name for name, _ in errors(capsys, *values, *paths)] == [
        *("configuration", "configuration", "data files", "folders", "layout", "data", "flow")
    ]
    rows = [text.partition(": ")[0] for name, text in errors(capsys) if name in ("data", "first rows")]
    assert sorted(rows) == ["train.jsonl:1", "train.jsonl:2", "train.jsonl:3"]


def test_the_report_has_a_line_for_each_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "--nproc-per-node", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "no errors"
    shown = {line[13:].split("  ")[0]: line for line in lines[:-1]}
    assert all(line.startswith("ok ") for line in shown.values())
    assert "2 processes = TP 1 x PP 1 x CP 1 x DP 2; 1 micro-batch" in shown["layout"]
    assert "train.jsonl: 8 rows" in shown["data"]
    assert "8 rows rendered, 2 to 2 tokens" in shown["first rows"]
    assert "60, padded to 128" in shown["tokenizer"]


def test_what_would_be_resumed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("saved", 6)
    assert main(["check", "run.yaml", f"{TRAIN}.save=saved"]) == 0
    text = capsys.readouterr().out
    assert "resumes from saved/iter_0000006" in text
    assert "no step is left: the checkpoint is of iteration 6, and the run has 6 steps" in text
    assert text.endswith("no errors, 1 warning\n")
    Path("other.jsonl").write_text(GOOD_ROW)
    assert main(["check", "run.yaml", f"{TRAIN}.save=saved", f"{DATA}.train=other.jsonl"]) == 0
    assert re.search(
        r"^warning .*another run: .*data.train was train.jsonl and is other.jsonl", capsys.readouterr().out, re.M
    )


def test_bad_rows_that_are_left_out_are_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.jsonl").write_text('{"inputs": 1}\n' * 5 + GOOD_ROW)
    assert main(["check", "run.yaml", f"{DATA}.on_bad_sample=skip"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(lines) == 4
    assert "train.jsonl:1: " in lines[0]
    assert "5 of the first 6 rows" in lines[3]


def test_a_flow_of_a_script_is_not_looked_up(capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text("")
    assert main(["check", "run.yaml", "--script", "script.py", f"{FLOW}.flow_key=of_the_script"]) == 0
    assert "the script registers the flow of_the_script" in capsys.readouterr().out
    assert main(["check", "run.yaml", "--script", "none.py"]) == 2
    assert capsys.readouterr().err == "error: --script none.py: no such file\n"


def test_a_dry_run_prints_the_report_and_what_would_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "launch_processes", lambda *_: pytest.fail("processes were started"))
    assert main(["train", "run.yaml", "--dry-run", "--nproc-per-node", "2", f"{TRAIN}.seed=3"]) == 0
    *_, summary, command = capsys.readouterr().out.splitlines()
    assert summary == "no errors"
    assert re.fullmatch(
        rf"would run: torchrun --standalone --nproc-per-node 2 \S+/train.py run.yaml {TRAIN}.seed=3", command
    )
    assert main(["train", "run.yaml", "--dry-run", f"{TRAIN}.seed=three"]) == 2
    assert "would run" not in capsys.readouterr().out
    monkeypatch.setenv("NNODES", "2")
    assert main(["check", "run.yaml", "--nproc-per-node", "1"]) == 0
    assert "2 processes = " in capsys.readouterr().out
    assert main(["train", "run.yaml", "--dry-run"]) == 2
    assert "set MASTER_ADDR" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert main(["train", "run.yaml", "--dry-run", "--nproc-per-node", "1"]) == 0
    assert "--nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500" in capsys.readouterr().out
