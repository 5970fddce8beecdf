"""The command of a TrainJob's pods, in two processes that have the variables and the files of two pods."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from _launcher import PROGRAM, ROOT, wait_for

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.launch.interface import Launch, Program
from megatron_wrap.launch.kubernetes import KubernetesLauncher
from megatron_wrap.launch.kubernetes_manifest import CONFIG_FOLDER

CONFIG = ROOT / "configs" / "tiny-llama-mock.yaml"


def command_of_pods(folder: Path) -> list[str]:
    """The arguments of megatron-wrap in each pod; `folder` is the volume, and has the files of the ConfigMap."""
    overrides = [
        "megatron_lm.train.common.train_iters=100000",
        f"megatron_lm.train.common.save={folder}/checkpoints",
        f"megatron_wrap.logger.output_dir={folder}/run",
        f"megatron_wrap.launch.kubernetes.volumes={{{folder}: claim}}",
        "megatron_wrap.init.platform=cpu",
    ]
    launch = Launch(read_run(CONFIG, overrides), ("train", str(CONFIG), *overrides), Program(()), 2, 1)
    KubernetesLauncher().preview(launch)
    objects = {each["kind"]: each for each in yaml.safe_load_all((folder / "run" / "trainjob.yaml").read_text())}
    for name, text in objects["ConfigMap"]["data"].items():
        (folder / name).write_text(text)
    program, *words = objects["TrainJob"]["spec"]["trainer"]["command"]
    assert program == "megatron-wrap"
    return [word.replace(CONFIG_FOLDER, str(folder)) for word in words]


def pods(folder: Path, words: list[str]) -> list[subprocess.Popen[str]]:
    """Both pods, which train."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    metrics = folder / "run" / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    trainer = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    environment = {**os.environ, **trainer, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=folder,
            env={**environment, "PET_NODE_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    wait_for(
        lambda: any(each.poll() is not None for each in started) or (metrics.exists() and metrics.stat().st_size > size)
    )
    return started


@pytest.mark.matrix
def test_pods_save_after_sigterm_at_one_of_them_and_their_replacements_resume(tmp_path):
    words = command_of_pods(tmp_path)
    saved = []
    for index in (1, 0):
        both = pods(tmp_path, words)
        both[index].send_signal(signal.SIGTERM)
        printed = [each.communicate(timeout=60)[1] for each in both]
        assert [each.returncode for each in both] == [75, 75], printed
        saved.append(int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()))
    assert saved[1] > saved[0] > 0
    assert f"resuming from iteration {saved[0]} " in printed[0]
