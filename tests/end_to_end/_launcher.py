"""`megatron-wrap train` on two processes, for tests and drills that send it signals."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import sys
from megatron_wrap.cli.main import main
sys.exit(main())
"""
OVERRIDES = {
    "megatron_lm.model.parallel.tensor_model_parallel_size": 2,
    "megatron_lm.train.common.train_iters": 100_000,
    "megatron_lm.train.common.save": "checkpoints",
    "megatron_wrap.init.platform": "cpu",
    "megatron_wrap.init.stopped_process_seconds": 15,
}
WORDS = ["train", str(ROOT / "configs/tiny-llama-mock.yaml"), *(f"{key}={value}" for key, value in OVERRIDES.items())]


class Launcher:
    """`megatron-wrap train` in a folder with further overrides, up to its next steps."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self._folder, self._overrides = folder, overrides
        metrics = folder / "outputs" / "tiny-llama-mock" / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        self.process = self._start()
        wait_for(lambda: self.process.poll() is not None or (metrics.exists() and metrics.stat().st_size > size))
        assert self.process.poll() is None, self.process.communicate()[1]
        self.ranks = children(self.process.pid)
        assert len(self.ranks) == 2

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *WORDS, *self._overrides],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def refused(self) -> str:
        """What a second run in the same folder prints."""
        second = self._start()
        _, printed = second.communicate(timeout=120)
        assert second.returncode == 2, printed
        return printed.splitlines()[-1]

    def end(self) -> tuple[int, list[str]]:
        """Exit code, and lines on the console without those of the logger."""
        _, printed = self.process.communicate(timeout=60)
        lines = [line for line in printed.splitlines() if " INFO " not in line and " WARNING " not in line]
        return self.process.returncode, lines

    @property
    def saved(self) -> int:
        """Iteration of the newest checkpoint."""
        return int((self._folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _content(task / "children").split()]


def _content(file: Path) -> bytes:
    """Nothing, if the thread or process has ended in the meantime."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
