"""What `megatron_wrap.launch.ray` runs: the trainer in the driver, and the loop in each of Ray's workers."""

from __future__ import annotations

import contextlib
import math
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.collective
from ray.train.torch import TorchConfig, TorchTrainer

from megatron_wrap.checkpoint.files.store import CheckpointStore
from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.core import MegatronWrap
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.launch.ray_ranks import workers_of_run
from megatron_wrap.parallel import rank_log
from megatron_wrap.parallel.stop_requests import RunStopped
from megatron_wrap.platform.base.machine import visible_gpus
from megatron_wrap.utils.dist_logger import logger

_SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray's list of the checkpoints of a run, with those that retention has removed since."""
_REPORT_SECONDS = 3.0
"""Of training between two reports of metrics: Ray reads them every two seconds, and a second one would wait."""
_END = "end"
"""What workers that take no part get after the last report."""


_train: Any = ray.train  # its stubs have the classes of Ray Train V1 alone


class Trainer(TorchTrainer):
    """Ray's trainer for a run; `fit` raises a user's error as it was raised in a worker.

    Args:
        config: of the run.
        work: called in each worker.
        scaling: number and resources of the workers.
        max_failures: restarts after failures of workers.
    """

    def __init__(self, config: RunConfig, work: Work, scaling: ray.train.ScalingConfig, max_failures: int) -> None:
        save = config.train.save
        folder = os.path.join(output_dir(config), "ray") if save is None else os.path.expanduser(save)
        self._folder = Path(os.path.abspath(folder))
        connections = cuda_connections(config, os.environ.get(CONNECTIONS)).value
        super().__init__(
            work,
            torch_config=TorchConfig(
                backend="nccl" if scaling.use_gpu else "gloo",
                timeout_s=round(60 * config.init.distributed_timeout_minutes),
            ),
            scaling_config=scaling,
            run_config=_train.RunConfig(
                name=self._folder.name,
                storage_path=str(self._folder.parent),
                failure_config=ray.train.FailureConfig(max_failures=max_failures),
                callbacks=[_UserErrors()],
                worker_runtime_env={"env_vars": {CONNECTIONS: str(connections), "PYTHONPATH": _own_paths()}},
            ),
        )

    def fit(self) -> ray.train.Result:
        """Run until the end.

        Raises:
            MegatronWrapError: the user's error of a worker. ray.train.TrainingFailedError: too many failures.
        """
        with contextlib.suppress(OSError):
            (self._folder / _SNAPSHOT).unlink()
        try:
            return super().fit()
        except ray.train.ControllerError as error:
            if isinstance(error.controller_failure, MegatronWrapError):
                raise error.controller_failure from None
            raise


class _UserErrors(ray.train.UserCallback):
    """Ends the run after a user's error, which would come again after a restart."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called in Ray's controller."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, MegatronWrapError):
                raise ray.train.ControllerError(error)


def scaling(config: RunConfig, num_workers: int | tuple[int, int]) -> ray.train.ScalingConfig:
    """One process on each CPU or GPU, as few nodes as possible."""
    gpus = config.init.platform == "cuda"
    if config.init.platform == "auto":
        gpus = bool(ray.cluster_resources().get("GPU") if ray.is_initialized() else visible_gpus())
    result: ray.train.ScalingConfig = _train.ScalingConfig(
        num_workers=num_workers, use_gpu=gpus, placement_strategy="PACK"
    )
    return result


def _own_paths() -> str:
    """Where this process imports modules from that are not installed, for PYTHONPATH: that of a loop, or of a flow."""
    installed = (sys.prefix, sys.base_prefix)
    folders = [os.path.abspath(folder) for folder in sys.path]
    return os.pathsep.join(dict.fromkeys(folder for folder in folders if not folder.startswith(installed)))


@dataclass(frozen=True)
class Work:
    """What each worker does."""

    folder: str = field(default_factory=os.getcwd, kw_only=True)
    """Working directory."""
    logs: str | None = field(default=None, kw_only=True)
    """Folder for the output of each rank; None: it stays Ray's."""

    def __call__(self) -> Any:
        """Called by Ray in a thread of each worker."""
        with contextlib.suppress(OSError):  # a node may have another one
            os.chdir(self.folder)
        if self.logs is not None:
            _write_into(Path(self.logs))
        try:
            return self.run()
        except MegatronWrapError:
            if self.logs is not None:  # the driver prints one line, Ray would print a traceback before it
                _write_to(os.devnull)
            raise

    def run(self) -> Any:
        """The work itself."""
        raise NotImplementedError


@dataclass(frozen=True)
class WrapLoop(Work):
    """A run of `MegatronWrap`: `loop(wrap)`, or `wrap.fit()`."""

    config: str
    overrides: tuple[str, ...]
    loop: Callable[[MegatronWrap], Any] | None
    use_gpu: bool

    def run(self) -> Any:
        """Train; returns the result of the loop, on rank 0 the one of `Result.return_value`."""
        platform = "cuda" if self.use_gpu else "cpu"
        wrap = MegatronWrap(self.config, [*self.overrides, f"megatron_wrap.init.platform={platform}"])
        with _ranks_of_run(wrap.config) as takes_part:
            if not takes_part:
                return None
            try:
                with wrap:
                    wrap.initialize()
                    wrap.setup_model_and_optimizer()
                    return _fit(wrap) if self.loop is None else self.loop(wrap)
            except RunStopped as stopped:
                return {"exit_code": stopped.code}


@dataclass(frozen=True)
class Script(Work):
    """A program of the user, which creates its own `MegatronWrap`."""

    config: RunConfig
    program: tuple[str, ...]

    def run(self) -> Any:
        """Run it as `__main__`; its exit code is the result."""
        with _ranks_of_run(self.config) as takes_part:
            if takes_part:
                sys.argv[:] = self.program
                return _ended(lambda: runpy.run_path(self.program[0], run_name="__main__"))
        return None


@dataclass(frozen=True)
class Call(Work):
    """A function of this package, which creates its own `MegatronWrap`."""

    config: RunConfig
    function: Callable[..., None]
    words: tuple[str, ...]

    def run(self) -> Any:
        """Call it; the exit code with which it ends is the result."""
        with _ranks_of_run(self.config) as takes_part:
            return _ended(lambda: self.function(*self.words)) if takes_part else None


def _ended(work: Callable[[], object]) -> dict[str, Any] | None:
    """The exit code with which `work` ends this process; None: it returns.

    Raises:
        MegatronWrapError: it ends because of one.
    """
    try:
        work()
    except SystemExit as end:
        if isinstance(end.__context__, MegatronWrapError):
            raise end.__context__ from None
        return {"exit_code": end.code or 0}
    return None


def _fit(wrap: MegatronWrap) -> dict[str, float]:
    interval, due = wrap.config.train.save_interval if wrap.config.train.save else None, 0

    def after_step(wrap: MegatronWrap, metrics: dict[str, float]) -> None:
        nonlocal due
        if wrap.iteration >= due or (interval and wrap.iteration % interval == 0):
            steps = math.ceil(_REPORT_SECONDS / metrics.get("elapsed_time", _REPORT_SECONDS))
            due = _announce(wrap.iteration + steps)  # each rank has measured another time
            _send(wrap, metrics)

    metrics = wrap.fit(after_step)
    report(wrap, {"iteration": wrap.iteration, **metrics})
    return metrics


def report(wrap: MegatronWrap, metrics: Mapping[str, float]) -> None:
    """See `megatron_wrap.launch.ray.report`."""
    _announce(wrap.iteration)
    _send(wrap, metrics)


def _announce(iteration: int) -> int:
    """Let workers that take no part join the next report; returns the value of rank 0."""
    return int(ray.train.collective.broadcast_from_rank_zero(iteration))


def _send(wrap: MegatronWrap, metrics: Mapping[str, float]) -> None:
    ray.train.report(
        dict(metrics),
        checkpoint=_new_checkpoint(wrap.config.train.save),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def _new_checkpoint(save: str | None) -> ray.train.Checkpoint | None:
    """On rank 0 the newest checkpoint, unless it was the last one that was reported."""
    if save is None or ray.train.get_context().get_world_rank() != 0:
        return None
    store = CheckpointStore(os.path.abspath(os.path.expanduser(save)))
    iteration = store.latest()
    path = None if iteration is None else store.find(iteration)
    reported = ray.train.get_checkpoint()
    if path is None or (reported is not None and reported.path == str(path)):
        return None
    return ray.train.Checkpoint.from_directory(str(path))


# ---- workers and ranks ----


@contextlib.contextmanager
def _ranks_of_run(config: RunConfig) -> Iterator[bool]:
    """Give this worker its rank of the run; yields whether it has one. Workers without one follow the reports, which
    Ray expects from all, until the others end."""
    import torch.distributed as dist

    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
    workers, rank = workers_of_run(config, nodes), dist.get_rank()
    if len(workers) == len(nodes):
        yield True
        return
    port = [_free_port() if rank == 0 else None]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"], os.environ["WORLD_SIZE"] = str(port[0]), str(len(workers))
    if rank in workers:
        os.environ["RANK"] = str(workers.index(rank))
        if rank == 0:
            logger.warning_rank_0(
                f"{len(nodes) - len(workers)} of Ray's {len(nodes)} workers take no part: the layout and the batch of "
                f"this run need {len(workers)}"
            )
        yield True
        ray.train.collective.broadcast_from_rank_zero(_END)
    else:
        while ray.train.collective.broadcast_from_rank_zero(None) != _END:
            ray.train.report({}, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)
        yield False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _write_into(folder: Path) -> None:
    """Append the output of this process to `folder/rank_N.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / rank_log.FILE.format(ray.train.get_context().get_world_rank())
    _write_to(path)


def _write_to(path: str | os.PathLike[str]) -> None:
    sys.stdout.flush(), sys.stderr.flush()
    with open(path, "ab") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
