"""Ctrl-C in the terminal of a run on several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import sys
from megatron_wrap.cli.main import main
sys.exit(main())
"""


def test_ctrl_c_on_two_processes_prints_one_sentence(tmp_path: Path) -> None:
    overrides = {
        "megatron_lm.model.parallel.tensor_model_parallel_size": 2,
        "megatron_lm.train.common.train_iters": 1000,
        "megatron_lm.train.common.save": "checkpoints",
        "megatron_lm.train.common.save_interval": 2,
        "megatron_wrap.init.platform": "cpu",
    }
    words = ["train", ROOT / "configs/tiny-llama-mock.yaml", *(f"{key}={value}" for key, value in overrides.items())]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 120
    while not tracker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = printed.splitlines()
    assert lines[-1].startswith("interrupted after iteration ")
    assert "newest checkpoint: checkpoints/iter_00" in lines[-1]
    assert lines[-1].endswith("the same command resumes from it")
    assert [line for line in lines[:-1] if " INFO " not in line and " WARNING " not in line] == [], printed
