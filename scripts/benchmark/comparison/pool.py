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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from comparison.task import Task
from comparison.worker import MARK


@dataclass(frozen=True)
class Launch:
    """How a program's processes are started."""

    program: str
    """A key of `worker.PROGRAMS`."""
    tree: Path = Path(__file__).resolve().parents[3]
    """The checkout whose package and `comparison.worker` run."""


class Program:
    """One program on `world_size` processes of this machine.

    Args:
        name: of its log files.
        logs: folder for what the processes print.
    """

    def __init__(self, name: str, launch: Launch, world_size: int, platform: str, logs: Path) -> None:
        self.name, self._launch = name, launch
        self._world_size, self._platform, self._logs = world_size, platform, logs
        self._answers: list[queue.Queue[dict[str, Any] | None]] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._is_ready = False
        self.start()

    def start(self) -> None:
        """Start the processes; `wait_until_ready` waits for their imports."""
        self._is_ready = False
        for rank in range(self._world_size):
            log = (self._logs / f"{self.name}-{rank}.log").open("a")
            process = subprocess.Popen(
                [sys.executable, "-m", "comparison.worker", self._launch.program],
                cwd=self._launch.tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(self._launch.tree, rank, self._world_size, self._platform),
            )
            answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
            threading.Thread(target=_listen, args=(process.stdout, log, answers), daemon=True).start()
            self._processes.append(process)
            self._answers.append(answers)

    def wait_until_ready(self, seconds: float) -> str:
        """Until all processes have imported their packages; returns why they have not, or an empty text."""
        error = "" if self._is_ready else self._collect(seconds)[1]
        self._is_ready = not error
        return error

    def restart(self) -> None:
        """New processes, whose imports take place while other programs run."""
        self.close()
        self.start()

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
        until, collected, error = time.monotonic() + seconds, [], ""
        for answers in self._answers:
            try:
                answer = answers.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                error = f"no answer within {seconds:.0f} s"
                break
            error = "its process ended; its log has the reason" if answer is None else answer.get("error", "")
            if answer is None or error:
                break  # the other processes wait for this one
            collected.append(answer)
        if error:
            self.close()
        return collected, error

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._answers = [], []


class Programs:
    """Programs by name, started on entering and ended on leaving."""

    def __init__(self, launches: Mapping[str, Launch], world_size: int, platform: str, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._programs = {name: Program(name, launch, world_size, platform, logs) for name, launch in launches.items()}

    def __enter__(self) -> dict[str, Program]:
        for program in self._programs.values():
            program.wait_until_ready(300)
        return self._programs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self._programs.values():
            program.close()


def _environment(tree: Path, rank: int, world_size: int, platform: str) -> dict[str, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tree / "scripts" / "benchmark"), str(tree), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if platform == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if visible != [""] else [str(index) for index in range(world_size)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:world_size])  # the Trainer would use all that it sees
    if world_size > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
        }
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    return environment


def _listen(lines: Any, log: Any, answers: queue.Queue[dict[str, Any] | None]) -> None:
    for line in lines:
        if line.startswith(MARK):
            answers.put(json.loads(line[len(MARK) :]))
        else:
            log.write(line)
            log.flush()
    answers.put(None)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
