"""Options of the commands that start runs, and the launchers that they choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wrap.cli.main import main
from megatron_wrap.launch import local

ROOT = Path(__file__).parents[3]
CONFIG, COMMON = "configs/tiny-llama-mock.yaml", "megatron_wrap.launch.common"
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(local, "launch_processes", lambda *_: pytest.fail("processes were started"))
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "arguments", "expected"),
    [
        ({}, [], "--standalone --nproc-per-node 1 "),
        ({}, [f"{COMMON}.gpus_per_node=2"], "--standalone --nproc-per-node 2 "),
        ({"GPUS_PER_NODE": "4"}, [f"{COMMON}.gpus_per_node=2"], "--standalone --nproc-per-node 4 "),
        ({"GPUS_PER_NODE": "4"}, ["--gpus-per-node", "2"], "--standalone --nproc-per-node 2 "),
        (TWO_NODES, [], "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500 --nproc-per-node 1 "),
        ({**TWO_NODES, "NNODES": "4"}, ["--nodes", "2"], "--nnodes 2 --node-rank 1 "),
        ({"MASTER_ADDR": "node0"}, [f"{COMMON}.nodes=2"], "--nnodes 2 --node-rank 0 "),
    ],
)
def test_the_command_line_precedes_the_environment_and_that_the_configuration(
    environment: dict[str, str],
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", CONFIG, "--dry-run", *arguments]) == 0
    assert f"would run: torchrun {expected}" in capsys.readouterr().out


def test_ray_is_chosen_by_the_option_or_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", CONFIG, "--dry-run", "--launcher", "ray", "--nodes", "2", "--gpus-per-node", "2"]) == 0
    assert f"would run: megatron-wrap train {CONFIG}, in 4 workers of Ray Train" in capsys.readouterr().out
    assert main(["check", CONFIG, f"{COMMON}.launcher=ray", "--nodes", "2"]) == 0
    assert "2 processes = " in capsys.readouterr().out
    assert main(["train", CONFIG, "--dry-run", f"{COMMON}.launcher=rya"]) == 2
    assert "must be one of local, ray" in capsys.readouterr().out


def test_with_ray_a_mistake_is_found_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    """By a process during the import of Ray."""
    words = ["--launcher", "ray", "--gpus-per-node", "2", "megatron_wrap.init.platform=cpu"]
    assert main(["train", CONFIG, *words, "megatron_lm.model.parallel.tensor_model_parallel_size=4"]) == 2
    assert "TP 4 x PP 1 x CP 1 = 4 processes each" in capsys.readouterr().err
    import ray

    assert not ray.is_initialized()


def test_precompute_and_profile_have_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--launcher", "ray", "--gpus-per-node", "2", "--dry-run"]
    assert main(["profile", CONFIG, "--steps", "1", *options]) == 0
    command = f"megatron-wrap profile {CONFIG} --steps 1 --warmup 5"
    assert f"would run: {command}, in 2 workers of Ray Train" in capsys.readouterr().out
    assert main(["profile", CONFIG, "--dry-run"]) == 0
    assert "--warmup 5, in 1 process on this node\n" in capsys.readouterr().out
