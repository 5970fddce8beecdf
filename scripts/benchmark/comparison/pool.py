"""The processes of the programs: all start at once, so that their imports overlap, and then train in turn."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

from comparison.task import Task
from comparison.worker import MARK
from megatron_wrap.config import load_run_config
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.parallel.loopback import ADDRESS, loopback_store
from megatron_wrap.platform.base.machine import this_machine

_START_SECONDS = 300
"""Time limit in seconds for a start of processes, whose imports may come from a slow disk."""
_FIRST_SECONDS = 75
"""Seconds that are added to the limit of the first run of processes, which compiles kernels."""
_STACK_SECONDS = 0.5
"""Seconds in which a process without an answer writes the stacks of its threads."""
_LEFT_GIB = 8.0
"""Memory of a device in GiB that a program may keep between its turns: new processes cost more than it is worth."""


@dataclass(frozen=True)
class Launch:
    """Command and checkout with which a program's processes are started."""

    program: str
    """Name of the program, a key of `worker.PROGRAMS`."""
    tree: Path = Path(__file__).resolve().parents[3]
    """Root of the checkout whose package and `comparison.worker` run."""


class Workers:
    """The processes of one start of a program, one for each device; the imports run while others train."""

    def __init__(self, name: str, launch: Launch, world_size: int, platform: str, logs: Path) -> None:
        self._answers: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []
        self._stores: list[TCPStore] = []  # served as long as the processes may use them
        self._is_ready = self.have_run = False
        self.queues: str | None = None
        """`CUDA_DEVICE_MAX_CONNECTIONS` of the processes' first run; None: the environment's."""
        for rank in range(world_size):
            log = (logs / f"{name}-{rank}.log").open("a")
            process = subprocess.Popen(
                [sys.executable, "-m", "comparison.worker", launch.program],
                cwd=launch.tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(launch.tree, rank, world_size, platform),
            )
            listener = (process.stdout, log, rank, self._answers)
            threading.Thread(target=_listen, args=listener, daemon=True).start()
            self._processes.append(process)

    def wait_until_ready(self, seconds: float) -> str:
        """Wait until all processes have imported their packages; returns an error, or an empty text."""
        error = "" if self._is_ready else self._collect(seconds)[1]
        self._is_ready = not error
        return error

    def run(
        self, task: Task, options: dict[str, Any], queues: str | None, seconds: float
    ) -> tuple[list[dict[str, Any]], str]:
        """Run the task; returns the answers of all processes by rank, and an error, or an empty text. Where the task
        needs fewer processes than there are, several replicas of the program train it side by side, each by itself."""
        size, self.have_run, self.queues = task.world_size, True, queues
        # this process serves the stores: a port that is chosen first and listened on later can be taken in between
        stores = [loopback_store(timedelta(seconds=seconds)) for _ in range(len(self._processes) // size)]
        self._stores += stores
        for index, process in enumerate(self._processes):
            order = {
                "task": task.as_json(),
                "options": options,
                "port": stores[index // size].port,
                "rank": index % size,
            }
            order["queues"] = queues
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its listener has reported the end
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
        return self._collect(seconds)

    def _collect(self, seconds: float) -> tuple[list[dict[str, Any]], str]:
        until, collected = time.monotonic() + seconds, {}
        while len(collected) < len(self._processes):
            try:
                rank, answer = self._answers.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                self._log_stacks()
                return [], f"no answer within {seconds:.0f} s"
            if answer is None:
                return [], "its process ended; its log has the reason"
            if "error" in answer:
                return [], answer["error"]  # the other processes may wait for this one
            collected[rank] = answer
        return [collected[rank] for rank in sorted(collected)], ""

    def _log_stacks(self) -> None:
        """Make each process write the stacks of its threads into its log."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            try:
                process.wait(10)  # a driver that hangs may keep it
            except subprocess.TimeoutExpired:
                print(f"process {process.pid} does not end", flush=True)


class Program:
    """One program on `world_size` processes of this machine.

    Args:
        name: prefix of the names of its log files.
        logs: folder for what the processes print.
        standby: whether to keep further processes that have imported everything, for the run after a failed one.
    """

    def __init__(
        self, name: str, launch: Launch, world_size: int, platform: str, logs: Path, standby: bool = False
    ) -> None:
        self._program = launch.program
        self._start = lambda: Workers(name, launch, world_size, platform, logs)
        self._standby = standby
        self._workers = self._start()
        self._next = self._start() if standby else None

    def wait_until_ready(self, seconds: float) -> str:
        """Wait until all processes have imported their packages; returns an error, or an empty text."""
        return self._workers.wait_until_ready(seconds)

    def restart(self) -> None:
        """Start new processes, whose imports run while other programs train."""
        self._workers.close()
        self._workers = self._next or self._start()
        self._next = self._start() if self._standby else None

    def run(self, task: Task, options: dict[str, Any], seconds: float, left: float = float("inf")) -> dict[str, Any]:
        """Train on all processes; returns the answer of the first, with the largest memory of all, or an `error`.

        After an error, without an answer within `seconds`, or if more than `_LEFT_GIB` of a device could not be freed,
        the next run has new processes, as has one with another number of hardware queues. The limit of the first run of
        processes is `_FIRST_SECONDS` longer.

        Args:
            left: seconds that are left for all runs.
        """
        begun, queues = time.monotonic(), _queues(self._program, task, options)
        if self._workers.have_run and queues != self._workers.queues:
            self.restart()
        error = self._workers.wait_until_ready(_START_SECONDS)
        waited = time.monotonic() - begun
        answers: list[dict[str, Any]] = []
        if not error:
            first = 0.0 if self._workers.have_run else _FIRST_SECONDS
            answers, error = self._workers.run(task, options, queues, max(1.0, min(seconds + first, left - waited)))
        if error or max(answer["left_gib"] for answer in answers) > _LEFT_GIB:
            self.restart()
        if error:
            return {"error": error}
        return _result(answers, task.world_size)

    def close(self) -> None:
        """End the processes."""
        for workers in (self._workers, self._next):
            if workers is not None:
                workers.close()


def _result(answers: list[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """The program's result from the answers by rank; for replicas that train side by side, with the mean of their
    times."""
    result = {**answers[0], "peak_memory_gib": max(answer["peak_memory_gib"] for answer in answers)}
    replicas = [answer["step_seconds"] for answer in answers[::world_size]]
    if len(replicas) > 1:
        result["step_seconds"] = [statistics.mean(times) for times in zip(*replicas, strict=True)]
        medians = ", ".join(f"{statistics.median(times):.4g}" for times in replicas)
        result["notes"] += f"; the mean of {len(replicas)} side by side: {medians} s"
    return result


class Programs:
    """Programs by name, started on entering and ended on leaving."""

    def __init__(
        self, launches: Mapping[str, Launch], world_size: int, platform: str, logs: Path, standby: bool = False
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._programs = {
            name: Program(name, launch, world_size, platform, logs, standby) for name, launch in launches.items()
        }

    def __enter__(self) -> dict[str, Program]:
        for program in self._programs.values():
            program.wait_until_ready(_START_SECONDS)
        return self._programs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self._programs.values():
            program.close()


def _queues(program: str, task: Task, options: Mapping[str, Any]) -> str | None:
    """`CUDA_DEVICE_MAX_CONNECTIONS` of a run: the choice of `megatron-wrap train`, or the value that Megatron-Core
    requires; None: the environment's value, or nothing to choose."""
    if task.platform == "cpu" or CONNECTIONS in os.environ:
        return None
    if program == "megatron-core":
        return "1" if max(task.tensor_parallel, task.context_parallel) > 1 else "32"
    if program != "megatron-wrap":
        return None
    config = load_run_config(task.config, [*task.overrides, *options["overrides"]])
    return str(cuda_connections(config, this_machine(task.platform), None).value)


def _environment(tree: Path, rank: int, world_size: int, platform: str) -> dict[str, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tree / "scripts" / "benchmark"), str(tree), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": ADDRESS,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # of this process: ranks connect to it, and none listens itself
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
        }
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    return environment


def _listen(lines: Any, log: Any, rank: int, answers: queue.Queue[tuple[int, dict[str, Any] | None]]) -> None:
    for line in lines:
        if line.startswith(MARK):
            answers.put((rank, json.loads(line[len(MARK) :])))
        else:
            log.write(line)
            log.flush()
    answers.put((rank, None))
