"""The processes of the programs: all start at once, so that their imports overlap, and then train in turn."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from comparison.task import Task
from comparison.worker import MARK

HERE = Path(__file__).resolve().parent


class Program:
    """One program on `world_size` processes of this machine.

    Args:
        name: a key of `worker.PROGRAMS`.
        logs: folder for what the processes print.
    """

    def __init__(self, name: str, world_size: int, platform: str, logs: Path) -> None:
        self.name = name
        self._world_size, self._platform, self._logs = world_size, platform, logs
        self._answers: list[queue.Queue[dict[str, Any] | None]] = []
        self._processes: list[subprocess.Popen[str]] = []
        self.start()

    def start(self) -> None:
        """Start the processes; `wait_until_ready` waits for their imports."""
        for rank in range(self._world_size):
            log = (self._logs / f"{self.name}-{rank}.log").open("a")
            process = subprocess.Popen(
                [sys.executable, "-m", "comparison.worker", self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(rank, self._world_size, self._platform),
            )
            answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
            threading.Thread(target=_listen, args=(process.stdout, log, answers), daemon=True).start()
            self._processes.append(process)
            self._answers.append(answers)

    def wait_until_ready(self, seconds: float) -> str:
        """Until all processes have imported their packages; returns why they have not, or an empty text."""
        return self._collect(seconds)[1]

    def run(self, task: Task, options: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Train on all processes; returns the answer of the first, with the largest memory of all, or an `error`.

        After an error, or without an answer within `seconds`, the processes end, because they may hold memory of the
        device; the next run has new ones.
        """
        if not self._processes:
            self.start()
            if error := self.wait_until_ready(300):
                return {"error": error}
        order = json.dumps({"task": task.as_json(), "options": options, "port": _free_port()})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        answers, error = self._collect(seconds)
        if error:
            return {"error": error}
        return {**answers[0], "peak_memory_gib": max(answer["peak_memory_gib"] for answer in answers)}

    def _collect(self, seconds: float) -> tuple[list[dict[str, Any]], str]:
        until, found, error = time.monotonic() + seconds, [], ""
        for answers in self._answers:
            try:
                answer = answers.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                error = f"no answer within {seconds:.0f} s"
                break
            error = "its process ended; its log has the reason" if answer is None else answer.get("error", "")
            if answer is None or error:
                break  # the other processes wait for this one
            found.append(answer)
        if error:
            self.close()
        return found, error

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._answers = [], []


class Programs:
    """Programs by name, started on entering and ended on leaving."""

    def __init__(self, names: Sequence[str], world_size: int, platform: str, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._programs = {name: Program(name, world_size, platform, logs) for name in names}

    def __enter__(self) -> dict[str, Program]:
        for program in self._programs.values():
            program.wait_until_ready(300)
        return self._programs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self._programs.values():
            program.close()


def _environment(rank: int, world_size: int, platform: str) -> dict[str, str]:
    own = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if platform == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if visible != [""] else [str(index) for index in range(world_size)]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:world_size])  # the Trainer would use all that it sees
    if world_size > 1:
        own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        own.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    return own


def _listen(lines: Any, log: Any, answers: queue.Queue[dict[str, Any] | None]) -> None:
    for line in lines:
        if line.startswith(MARK):
            answers.put(json.loads(line[len(MARK) :]))
        else:
            log.write(line)
            log.flush()
    answers.put(None)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
