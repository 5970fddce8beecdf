"""`--launcher ray`: a run under Ray Train with the console and the exit codes of a run without it."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.launch.contract.launcher import Ended, Launch, Launcher
from megatron_wrap.launch.contract.logs import show_from
from megatron_wrap.launch.ray import require_ray
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.parallel import rank_log
from megatron_wrap.parallel.watch.interrupts import INTERRUPTED, RESUME
from megatron_wrap.parallel.watch.stop_requests import SIGNALS, STOP_FILE, say_received

_FOLLOW_SECONDS = 0.2
_MAX_FAILURES = 3
"""Restarts after failures of workers, as of `trainer`."""
_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
"""Ray's process that announces a preemption to workers; off unless set. No worker reads the announcement, its
start takes time from theirs, and without it Ray still counts a preemption that has happened as one."""
_STORE_BYTES = 200 * 2**20
"""Object store of a cluster that is started for one run, which puts nothing into it."""


class RayLauncher(Launcher):
    """Workers of Ray Train in the cluster of RAY_ADDRESS, else in one on this node that lasts as long as the run."""

    def preview(self, launch: Launch) -> str:
        """The number of workers, where they are and what they run."""
        where = os.environ.get("RAY_ADDRESS")
        cluster = "a cluster on this node that ends with the run" if where is None else f"the cluster {where}"
        workers = counted(self.world_size(launch), "worker")
        return f"megatron-wrap {shlex.join(launch.command)}, in {workers} of Ray Train in {cluster}"

    def start(self, launch: Launch) -> RayJob:
        """See `Launcher`."""
        require_ray()
        return RayJob(launch, self.world_size(launch))


class RayJob:
    """A run whose driver is this process.

    Shows what rank 0 prints; `OUTPUT_DIR/logs` has the output of every rank. A signal lets the run save after its step
    and end, as without Ray; the second one ends it at once.
    """

    announcement = ""

    def __init__(self, launch: Launch, workers: int) -> None:
        self._launch, self._workers = launch, workers

    def wait(self) -> Ended:
        """See `Job`; the exit code is 1 after too many failures, 75 or 130 after a signal."""
        from megatron_wrap.launch import ray_trainer, ray_workers

        os.environ.setdefault(_PREEMPTION_WATCHER, "0")
        _connect(self._workers)
        config, program = self._launch.config, self._launch.program
        folder = Path(os.path.abspath(output_dir(config)))
        scaling, logs = ray_trainer.scaling(config, self._workers), str(folder / "logs")
        work: ray_workers.Work
        if program.function is not None:
            work = ray_workers.Call(config, program.function, program.words, logs=logs)
        elif program.script is not None:
            work = ray_workers.Script(config, (program.script, *program.words), logs=logs)
        else:
            path, *overrides = program.words
            work = ray_workers.WrapLoop(os.path.abspath(path), tuple(overrides), None, bool(scaling.use_gpu), logs=logs)
        return _Followed(ray_trainer.Trainer(config, work, scaling, _MAX_FAILURES), folder).ended()


def _connect(workers: int) -> None:
    import ray

    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**quiet)
    else:
        cpus = max(workers, os.cpu_count() or 1)
        ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)


class _Followed:
    """A trainer at work in a thread, while this one shows the log of rank 0 and receives signals."""

    def __init__(self, prepared: Any, folder: Path) -> None:
        self._trainer, self._stop, self._log = prepared, folder / STOP_FILE, folder / "logs" / rank_log.FILE.format(0)
        self._signal: int | None = None
        self._outcome: Any = None

    def ended(self) -> Ended:
        """Wait for the end."""
        shown = self._log.stat().st_size if self._log.exists() else 0
        before = {number: signal.signal(number, self._received) for number in SIGNALS}
        # Ray's own handler of SIGINT, which saves nothing, is installed in a main thread only
        thread = threading.Thread(target=self._fit, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_FOLLOW_SECONDS)
                shown = show_from(self._log, shown)
                if self._signal is not None:
                    with contextlib.suppress(OSError):  # a run that begins removes it
                        self._stop.touch()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._signal is not None:
                with contextlib.suppress(OSError):
                    self._stop.unlink()
        return self._result()

    def _fit(self) -> None:
        try:
            self._outcome = self._trainer.fit()
        except BaseException as error:
            self._outcome = error

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)  # Ray ends the workers with their driver
        self._signal = number
        say_received(number)

    def _result(self) -> Ended:
        import ray.train

        if isinstance(self._outcome, ray.train.TrainingFailedError):
            failures = getattr(self._outcome, "worker_failures", {})
            rank, cause = min(failures.items(), default=("", self._outcome))
            line = (str(cause).strip().splitlines() or [type(cause).__name__])[-1].strip()
            where = f"worker {rank}: " if failures else ""
            if rank:  # the console has those of rank 0
                sys.stderr.write(rank_log.summary(self._log.parent, int(rank)))
            sys.stderr.write(f"error: {where}{type(cause).__name__}: {line}; logs: {self._log.parent}\n")
            return Ended(1, finished=False)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        if self._signal is not None:
            return Ended(INTERRUPTED if self._signal == signal.SIGINT else RESUME, finished=False)
        value = self._outcome.return_value
        stopped = isinstance(value, dict) and "exit_code" in value
        return Ended(int(value["exit_code"]) if stopped else 0, finished=not stopped)
