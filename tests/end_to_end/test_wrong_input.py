"""Each wrong input: one clear message, exit code 2, nothing written, no process started."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

TINY = """\
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
      __override__: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, vocab_size: 4096}
    parallel: {__override__: {PARALLEL}}
  train:
    common: {micro_batch_size: 2, global_batch_size: 4, seq_length: 32, train_iters: 2, MORE_TRAIN}
    learning-rate: {lr: 2e-4}
    dtype: {__select__: fp32}
megatron_wrap:
  init: {platform: cpu}
  logger: {progress_bar: false}
  flow: {__select__: FLOW}
  data: {__select__: DATA}
"""


UNFINISHED = """\
from megatron_wrap.flow import MegatronWrapGPTModelSFTFlow, MegatronWrapTrainingFlowBase
class Unfinished(MegatronWrapTrainingFlowBase):
    def collate_data_micro_batch(self, iterator): ...
class OnAnotherDevice(MegatronWrapGPTModelSFTFlow):
    def collate_data_micro_batch(self, iterator):
        model_inputs, loss_inputs = super().collate_data_micro_batch(iterator)
        return model_inputs, {**loss_inputs, "ids": [1, 2]}
"""


def config(folder: Path, *, parallel: str = "tensor_model_parallel_size: 1", more_train: str = "seed: 1",
           flow: str = "minimal_mock", data: str = "mock") -> Path:  # fmt: skip
    """A small configuration with parts replaced."""
    text = TINY.replace("{PARALLEL}", "{" + parallel + "}").replace("MORE_TRAIN", more_train)
    path = folder / "run.yaml"
    path.write_text(text.replace("FLOW", flow).replace("DATA", data))
    return path


WRONG = yaml.safe_load((Path(__file__).parent / "wrong_input.yml").read_text(encoding="utf-8"))
LENGTHS = "".join(json.dumps({"input_ids": [1] * n, "loss_mask": [1] * n}) + "\n" for n in (3, 40))


def written(folder: Path) -> list[str]:
    """Names below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(command, folder: Path, run: Path, *overrides: str, words: Iterable[str], environment=None) -> None:
    """The command ends with 2 and one line that contains all of these, before anything is written."""
    before = written(folder)
    ended = command("megatron_wrap.cli.main", "train", run.name, *overrides, environment=environment)
    assert ended.code == 2, ended.err
    assert written(folder) == before
    lines = [line for line in ended.err.splitlines() if line]
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    assert "INFO" not in ended.out + ended.err  # no process was started
    assert ended.seconds < 20


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "quick" in wrong else pytest.mark.matrix) for case, wrong in WRONG.items()]
)
def test_wrong_input_is_one_line(command, tmp_path, case):
    wrong = WRONG[case]
    run = config(tmp_path, **wrong.get("parts", {}))
    run.write_text(run.read_text().replace(*wrong.get("replaced", ("", ""))))
    for name, content in {"my_flow.py": UNFINISHED, **wrong.get("files", {})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LENGTHS if content == "LENGTHS" else content)
    environment = {"GPUS_PER_NODE": str(wrong.get("processes", 1)), "PYTHONDONTWRITEBYTECODE": "1"}
    overrides = wrong.get("overrides", [])
    refused(command, tmp_path, run, *overrides, words=wrong["words"], environment=environment)


@pytest.mark.matrix
def test_flow_that_collates_no_tensor(command, tmp_path):
    """Refused on the head of the data before the model is built, in one message."""
    (tmp_path / "my_flow.py").write_text(UNFINISHED)
    (tmp_path / "train.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}\n' * 4)
    run = config(tmp_path, flow="gpt_sft", data="jsonl")
    overrides = ["megatron_wrap.data.train=train.jsonl", "megatron_wrap.flow.flow_key=my_flow:OnAnotherDevice"]
    ended = command("megatron_wrap.cli.main", "train", run.name, *overrides)
    assert ended.code == 2, ended.err
    assert ended.err.count("error: ") == 1, ended.err
    assert "field 'ids' is list; make it a CPU tensor" in ended.err


@pytest.mark.matrix
def test_checkpoint_of_another_model(command, tmp_path):
    run = config(tmp_path, more_train="save: ckpt")
    assert command("megatron_wrap.cli.main", "train", run.name).code == 0
    run.write_text(run.read_text().replace("ffn_hidden_size: 64", "ffn_hidden_size: 96"))
    refused(command, tmp_path, run, words=["ckpt", "linear_fc1", "ffn_hidden_size", "64", "96"])


def test_a_mistake_that_only_the_ranks_find_is_said_once_and_ends_them_all(command, tmp_path):
    """A conversation without a role is found when it is collated, on both processes at once."""
    (tmp_path / "train.jsonl").write_text('{"unknown": "key"}\n')
    run = config(tmp_path, flow="gpt_sft", data="jsonl", parallel="tensor_model_parallel_size: 2")
    ended = command("megatron_wrap.cli.main", "train", run.name, "megatron_wrap.data.train=train.jsonl")
    assert ended.code == 2, ended.err
    assert ended.err.count("error: ") == 1, ended.err
    assert '"unknown"' in ended.err
    assert "Traceback" not in ended.err
    assert ended.seconds < 60


@pytest.mark.matrix
def test_run_example_ends_with_2_too(tmp_path):
    root = Path(__file__).parents[2]
    if not (root / ".venv/bin/python").exists():
        pytest.fail("scripts/run_tests.sh makes .venv; run the tests through it")
    ended = subprocess.run(
        ["bash", root / "scripts/run_example.sh", "configs/tiny-llama-sft.yaml", "megatron_lm.train.common.seed=x"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr.count("error: ") == 1


@pytest.mark.matrix
def test_the_summary_of_torchrun_has_the_message_as_root_cause(command, tmp_path):
    run = config(tmp_path, parallel="tensor_model_parallel_size: 2")
    train = Path(__file__).parents[2] / "examples/train.py"
    ended = command("torch.distributed.run", "--nproc-per-node", 2, train, run.name, "megatron_lm.train.comon.seed=1")
    assert ended.code != 0
    printed, summary = ended.err.split("Root Cause", 1)
    assert printed.count("\nerror: ") + printed.startswith("error: ") == 1, ended.err  # once, before the summary
    assert "exitcode  : 2 " in summary
    assert "traceback : error: command line megatron_lm.train.comon" in summary
    assert "did you mean common?" in summary
    assert "<N/A>" not in summary


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("DataError('train.jsonl:3: no role')", "error: train.jsonl:3: no role"),
        ("ValueError('a bug')", "in <module>"),
    ],
)
def test_the_root_cause_is_the_rank_that_failed_not_one_that_torchrun_ended(command, tmp_path, raised, shown):
    (tmp_path / "run.py").write_text(
        "import os, time\n"
        "from megatron_wrap.core import exit_on_user_error\n"
        "from megatron_wrap.errors import DataError\n"
        "with exit_on_user_error():\n"
        "    if os.environ['RANK'] == '1':\n"
        f"        raise {raised}\n"
        "    time.sleep(100)\n"
    )
    ended = command("torch.distributed.run", "--nproc-per-node", 2, "run.py")
    summary = ended.err.split("Root Cause", 1)[1]
    assert "rank      : 1 " in summary
    assert shown in summary
