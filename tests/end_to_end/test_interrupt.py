"""Signals at a run on several processes, and its end with the program that started it."""

from __future__ import annotations

import json
import os
import re
import signal
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
    """`megatron-wrap train` in a folder, up to its next steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        metrics = folder / "outputs" / "tiny-llama-mock" / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        self.process = self._start()
        _wait_for(lambda: self.process.poll() is not None or (metrics.exists() and metrics.stat().st_size > size))
        assert self.process.poll() is None, self.process.communicate()[1]
        self.ranks = [pid for pid in _children(self.process.pid) if b"run_path" in _command(pid)]

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *WORDS],
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


def _wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _content(task / "children").split()]


def _command(pid: int) -> bytes:
    return _content(Path(f"/proc/{pid}/cmdline"))


def _content(file: Path) -> bytes:
    """Nothing, if the thread or process has ended in the meantime."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_signals_save_and_the_run_continues_and_ends_with_its_launcher(tmp_path: Path) -> None:
    run = Launcher(tmp_path)
    refused = run.refused()
    assert refused.startswith("error: outputs/tiny-llama-mock is in use by another run, process "), refused
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    code, lines = run.end()
    resumes = "the same command resumes from it"
    of_iteration = (
        f"after iteration {run.saved} of 100000; newest checkpoint: checkpoints/iter_{run.saved:07d}; {resumes}"
    )
    announced = "the run saves after this step and ends"
    assert (code, lines) == (
        130,
        [f"Ctrl-C: {announced}; a second Ctrl-C ends it at once", f"interrupted {of_iteration}"],
    )
    interrupted = run.saved

    run = Launcher(tmp_path)
    os.kill(run.ranks[1], signal.SIGUSR1)
    code, lines = run.end()
    assert run.saved > interrupted
    of_iteration = (
        f"after iteration {run.saved} of 100000; newest checkpoint: checkpoints/iter_{run.saved:07d}; {resumes}"
    )
    assert (code, lines) == (75, [f"stopped by SIGUSR1 {of_iteration}"])
    stopped = run.saved

    run = Launcher(tmp_path)
    os.kill(run.process.pid, signal.SIGKILL)
    _wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in run.ranks), 60)
    assert not any(Path(f"/proc/{rank}").exists() for rank in run.ranks)
    assert run.saved > stopped
    assert run.end()[0] == -signal.SIGKILL

    run = Launcher(tmp_path)
    os.kill(run.ranks[1], signal.SIGSTOP)
    code, lines = run.end()
    report = "outputs/tiny-llama-mock/failure.json"
    assert code == 1
    assert re.fullmatch(
        rf"error: rank 1 \(process {run.ranks[1]} on .*, iteration \d+(, [a-z ]+)?\) is stopped: no sign of life for "
        rf"\d+ s; {report} has the state of all; messages of the processes are above",
        lines[-1],
    )
    failure = json.loads((tmp_path / report).read_text())
    assert (failure["rank"], failure["process"]) == (1, run.ranks[1])
    assert [state["rank"] for state in failure["processes"]] == [0, 1]
    assert "train_step" in failure["stacks"]["0"]
