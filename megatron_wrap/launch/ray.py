"""Runs under Ray: `trainer` returns Ray Train's `TorchTrainer` for a configuration; `--launcher ray` runs one with the
console and the exit codes of a run without Ray. Importing it needs no Ray."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.config.schema.derived import output_dir, processes_needed
from megatron_wrap.core.validation import validate
from megatron_wrap.errors import LayoutError, PlatformError
from megatron_wrap.launch.interface import Ended, Launch, Launcher, Program, show_from
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.parallel import rank_log
from megatron_wrap.parallel.watch.ending import INTERRUPTED, RESUME
from megatron_wrap.parallel.watch.stop_requests import SIGNALS, STOP_FILE, say_received

if TYPE_CHECKING:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.launch.ray_workers import Work

_MAX_FAILURES = 3
"""Default number of restarts after failures of workers."""
_FOLLOW_SECONDS = 0.2
_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
"""Variable that enables Ray's process for announcing preemptions to workers; it is off unless set. No worker reads the
announcement, its start takes time from theirs, and without it Ray still counts a preemption that has happened as
one."""
_STORE_BYTES = 200 * 2**20
"""Bytes of the object store of a cluster that is started for one run, which puts nothing into it."""


def trainer(
    config: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    loop: Callable[[MegatronWrap], Any] | None = None,
    script: Sequence[str] | None = None,
    num_workers: int | tuple[int, int] | None = None,
    scaling_config: ScalingConfig | None = None,
    max_failures: int = _MAX_FAILURES,
    logs: str | None = None,
) -> TorchTrainer:
    """Ray Train's trainer whose workers are the ranks of a run, in the working directory of the caller.

    After a failure of a worker, and with another number of workers, the run resumes from its newest checkpoint. The
    result's `checkpoint.path` is the folder of that checkpoint, `return_value` what the loop returned on rank 0.

    Args:
        config: path of the run's YAML, which every node sees under this path.
        overrides: `a.b.c=value` strings.
        loop: called as `loop(wrap)` on every rank, with a run that is set up; default: `wrap.fit()`, which reports
            metrics every few seconds and after each save. A loop of your own calls `report(wrap, metrics)`.
        script: path and arguments of a program that creates its own `MegatronWrap`, instead of `loop`.
        num_workers: number of processes. (least, most): elastic; as many as the cluster has room for, of which as many
            take part as the layout and the batch allow. Default: the fewest that can run the configuration.
        scaling_config: Ray Train's ScalingConfig, instead of `num_workers`.
        max_failures: restarts after failures; -1: any number. A user's error is not repeated.
        logs: folder for the output of each rank, `rank_N.log`; default: Ray shows and keeps it.

    Raises:
        PlatformError: Ray is not installed. MegatronWrapError: the configuration is wrong.
    """
    require_ray()
    from megatron_wrap.launch import ray_trainer, ray_workers

    run = read_run(config, overrides)
    if scaling_config is None:
        scaling_config = ray_trainer.scaling(run, processes_needed(run) if num_workers is None else num_workers)
    workers: Any = scaling_config.num_workers
    most = workers[1] if isinstance(workers, tuple) else workers
    if isinstance(workers, tuple):
        if run.train.save is None:
            raise LayoutError("an elastic run resumes from its checkpoints; set megatron_lm.train.common.save")
        most = ray_workers.largest_layout(run, most)
    else:
        check_layout(run, most)
    validate(run, most, own_script=script is not None)
    program = Program((os.fspath(config), *overrides)) if script is None else Program(tuple(script[1:]), script[0])
    return ray_trainer.torch_trainer(
        run, _work(run, program, bool(scaling_config.use_gpu), logs, loop), scaling_config, max_failures
    )


def _work(
    config: RunConfig,
    program: Program,
    use_gpu: bool,
    logs: str | None,
    loop: Callable[[MegatronWrap], Any] | None = None,
) -> Work:
    """The work of each worker."""
    from megatron_wrap.launch import ray_workers

    if program.function is not None:
        call = partial(program.function, *program.words)
    elif program.script is not None:
        call = partial(ray_workers.run_script, program.script, *program.words)
    else:
        path, *overrides = program.words
        call = partial(ray_workers.train, os.path.abspath(path), overrides, loop, use_gpu)
    return ray_workers.Work(config, call, logs)


def report(wrap: MegatronWrap, metrics: Mapping[str, float]) -> None:
    """Report metrics to Ray Train, and the run's newest checkpoint by reference if Ray does not know it yet: its files
    stay where they are, and `megatron_wrap.checkpoint.keep` determines which ones are kept.

    Collective; returns at once unless Ray has not yet read the last report, which it does every two seconds.
    """
    from megatron_wrap.launch import ray_workers

    ray_workers.report(wrap, metrics)


def require_ray() -> None:
    """Raise PlatformError, with the command that installs it, where Ray Train is missing."""
    try:
        importlib.import_module("ray.train")
    except ImportError as error:
        raise PlatformError(f"Ray Train cannot be imported ({error}); pip install 'megatron-wrap[ray]'") from None


# ---- --launcher ray ----


class RayLauncher(Launcher):
    """Workers of Ray Train in the cluster of RAY_ADDRESS, else in one on this node that lasts as long as the run."""

    def preview(self, launch: Launch) -> str:
        """The number of workers, their cluster, and their command."""
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
        self._config, self._program, self._workers = launch.config, launch.program, workers
        folder = Path(os.path.abspath(output_dir(launch.config)))
        self._stop, self._logs = folder / STOP_FILE, folder / "logs"
        self._signal: int | None = None
        self._outcome: Any = None

    def wait(self) -> Ended:
        """See `Job`; the exit code is 1 after too many failures, 75 or 130 after a signal."""
        from megatron_wrap.launch import ray_trainer

        os.environ.setdefault(_PREEMPTION_WATCHER, "0")
        _connect(self._workers)
        scaling = ray_trainer.scaling(self._config, self._workers)
        work = _work(self._config, self._program, bool(scaling.use_gpu), str(self._logs))
        self._fit(ray_trainer.Trainer(self._config, work, scaling, _MAX_FAILURES))
        return self._result()

    def _fit(self, prepared: Any) -> None:
        """Let a trainer work in a thread, while this one shows the log of rank 0 and receives signals."""

        def fit() -> None:
            try:
                self._outcome = prepared.fit()
            except BaseException as error:
                self._outcome = error

        log = self._logs / rank_log.FILE.format(0)
        shown = log.stat().st_size if log.exists() else 0
        before = {number: signal.signal(number, self._received) for number in SIGNALS}
        # Ray's own handler of SIGINT, which saves nothing, is installed in a main thread only
        thread = threading.Thread(target=fit, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_FOLLOW_SECONDS)
                shown = show_from(log, shown)
                if self._signal is not None:
                    with contextlib.suppress(OSError):  # a run that begins removes it
                        self._stop.touch()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._signal is not None:
                self._stop.unlink(missing_ok=True)

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
            if rank:  # the console has the lines of rank 0
                sys.stderr.write(rank_log.summary(self._logs, int(rank)))
            sys.stderr.write(f"error: {where}{type(cause).__name__}: {line}; logs: {self._logs}\n")
            return Ended(1, finished=False)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        if self._signal is not None:
            return Ended(INTERRUPTED if self._signal == signal.SIGINT else RESUME, finished=False)
        value = self._outcome.return_value
        stopped = isinstance(value, dict) and "exit_code" in value
        return Ended(int(value["exit_code"]) if stopped else 0, finished=not stopped)


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
