"""A flow of an installed package and one of a folder: found, their keys checked, run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """\
from setuptools import setup
setup(
    name="tiny-flows",
    version="1.0",
    py_modules=["tiny_flows"],
    entry_points={"megatron_wrap.flows": ["tiny_halved = tiny_flows:Halved"]},
)
"""
MODULE = """\
from dataclasses import dataclass

from megatron_wrap.flow import LossOutput, MegatronWrapMinimalMockFlow


class Halved(MegatronWrapMinimalMockFlow):
    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapMinimalMockFlow.Config):
        factor: float

    def calculate_loss(self, loss_inputs, model_forward_output):
        loss = super().calculate_loss(loss_inputs, model_forward_output)
        return LossOutput(loss.loss_sum * self.flow_config.factor, {"factor": self.flow_config.factor})
"""
RUN = """\
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
      __override__: {num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, vocab_size: 64}
  train:
    common: {micro_batch_size: 2, global_batch_size: 4, seq_length: 16, train_iters: 1}
    learning-rate: {lr: 1e-3}
    dtype: {__select__: fp32}
megatron_wrap:
  init: {platform: cpu}
  data: {__select__: mock}
  flow:
    __select__: custom
    __override__:
      flow_key: FLOW
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed the package into."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    (source / "setup.py").write_text(SETUP)
    (source / "tiny_flows.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


@pytest.mark.parametrize("flow", [pytest.param("tiny_halved", marks=pytest.mark.matrix), "tiny_flows:Halved"])
def test_a_flow_of_an_installed_package_runs_with_its_own_keys(command, tmp_path, installed, flow):
    (tmp_path / "run.yaml").write_text(RUN.replace("FLOW", flow) + "      factor: 0.5\n")
    root = Path(__file__).parents[2]
    ended = command("megatron_wrap.cli.main", "train", "run.yaml", environment={"PYTHONPATH": f"{root}:{installed}"})
    assert ended.code == 0, ended.err
    assert "| factor 0.5000 |" in ended.out + ended.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fcator: 0.5", "run.yaml:17 megatron_wrap.flow.fcator: unknown key; did you mean factor?"),
        pytest.param(
            "factor: half",
            "run.yaml:17 megatron_wrap.flow.factor: must be a number, not the string 'half'",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "vary_length: true",
            "megatron_wrap.flow.factor is missing and Halved.Config has no default for it",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_wrong_key_is_one_line_and_no_process(command, tmp_path, line, message):
    (tmp_path / "tiny_flows.py").write_text(MODULE)  # in the working folder, not installed
    (tmp_path / "run.yaml").write_text(RUN.replace("FLOW", "tiny_flows:Halved") + f"      {line}\n")
    ended = command("megatron_wrap.cli.main", "train", "run.yaml")
    assert ended.code == 2
    [line] = [text for text in ended.err.splitlines() if text]
    assert line.startswith("error: ")
    assert message in line
    assert "INFO" not in ended.out + ended.err


@pytest.mark.matrix
def test_a_new_flow_passes_its_test(command, tmp_path):
    assert command("megatron_wrap.cli.main", "new-flow", "my_loss", "--folder", "flows").code == 0
    test = tmp_path / "flows/test_my_loss.py"
    written = test.read_text()
    test.write_text(written.replace("LAYOUTS = None", 'LAYOUTS = ["tp2-sp", "cp2"]'))  # all take longer, and pass
    ended = command("pytest", "-q", "-p", "no:cacheprovider", "flows/test_my_loss.py", timeout=600)
    assert ended.code == 0, ended.out + ended.err
    assert "1 passed" in ended.out
    # the test would see a mistake: the flow multiplied by the context-parallel size
    flow = tmp_path / "flows/my_loss.py"
    flow.write_text(flow.read_text().replace("LossOutput(loss_sum,", "LossOutput(loss_sum * self.context.cp_size,"))
    test.write_text(written.replace("LAYOUTS = None", 'LAYOUTS = ["cp2"]'))
    ended = command("pytest", "-q", "-p", "no:cacheprovider", "flows/test_my_loss.py")
    assert ended.code == 1
    assert "= the context-parallel size" in ended.out


LEAVING = """\
import os, sys

from megatron_wrap.flow import MegatronWrapMinimalMockFlow


class Leaving(MegatronWrapMinimalMockFlow):
    calls = 0

    def calculate_loss(self, loss_inputs, model_forward_output):
        Leaving.calls += 1
        if os.environ["RANK"] == "1" and Leaving.calls == 5:
            {leave}
        return super().calculate_loss(loss_inputs, model_forward_output)
"""


@pytest.mark.matrix
@pytest.mark.parametrize(("leave", "exit_code"), [("sys.exit(0)", 0), ("os._exit(75)", 75)])
def test_a_flow_that_ends_its_process_is_a_failure_of_that_rank(command, tmp_path, leave, exit_code):
    (tmp_path / "leaving.py").write_text(LEAVING.format(leave=leave))
    (tmp_path / "run.yaml").write_text(RUN.replace("FLOW", "leaving:Leaving"))
    overrides = ("megatron_lm.train.common.train_iters=8", "megatron_wrap.logger.output_dir=out")
    ended = command("megatron_wrap.cli.main", "train", "run.yaml", "--nproc-per-node", "2", *overrides)
    assert ended.code == 1, ended.err
    assert "next:" not in ended.out
    failure = json.loads((tmp_path / "out/failure.json").read_text())
    assert (failure["rank"], failure["iteration"], failure["phase"]) == (1, 5, "forward and backward")
    assert failure["exit_codes"]["1"] == exit_code
    assert ended.err.splitlines()[-1].startswith(f"error: rank 1 (process {failure['process']} on ")
