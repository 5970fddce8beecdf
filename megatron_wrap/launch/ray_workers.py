"""Code that runs in each of Ray's workers: the loop of a rank, and its reports."""

from __future__ import annotations

import contextlib
import math
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray.train
import ray.train.collective

from megatron_wrap.checkpoint.files.run_folder import CheckpointFolder
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.layout import check_layout
from megatron_wrap.core import MegatronWrap
from megatron_wrap.errors import LayoutError, MegatronWrapError
from megatron_wrap.launch.ray_controller import NODES
from megatron_wrap.parallel import rank_log
from megatron_wrap.utils.dist_logger import logger

_REPORT_SECONDS = 3.0
"""Seconds of training between two reports of metrics: Ray reads them every two seconds, and a second report would
wait."""
_END = "end"
"""Value that workers which take no part receive after the last report."""


@dataclass(frozen=True)
class Work:
    """The work of each worker, which Ray calls in a thread of it."""

    config: RunConfig
    call: Callable[[], Any]
    """Function that creates the run's `MegatronWrap`; it is pickled."""
    logs: str | None = None
    """Folder for the output of each rank; None: Ray keeps the output."""
    folder: str = field(default_factory=os.getcwd)
    """Working directory of the worker."""

    def __call__(self) -> Any:
        """The result of the call, or the exit code with which it ends; on rank 0 it becomes `Result.return_value`.

        Raises:
            MegatronWrapError: the call ends with a user's error.
        """
        with contextlib.suppress(OSError):  # a node may have another one
            os.chdir(self.folder)
        if self.logs is not None:
            os.makedirs(self.logs, exist_ok=True)
            rank = ray.train.get_context().get_world_rank()
            _write_to(os.path.join(self.logs, rank_log.FILE.format(rank)))
        try:
            with _ranks_of_run(self.config) as takes_part:
                return self._called() if takes_part else None
        except MegatronWrapError:
            if self.logs is not None:  # the driver prints one line, Ray would print a traceback before it
                _write_to(os.devnull)
            raise

    def _called(self) -> Any:
        try:
            return self.call()
        except SystemExit as end:
            if isinstance(end.__context__, MegatronWrapError):
                raise end.__context__ from None
            return {"exit_code": end.code or 0}


def train(config: str, overrides: Sequence[str], loop: Callable[[MegatronWrap], Any] | None, use_gpu: bool) -> Any:
    """Train a run of `MegatronWrap`; returns the result of `loop(wrap)`, or of `wrap.fit()`."""
    platform = "cuda" if use_gpu else "cpu"
    with MegatronWrap(config, [*overrides, f"megatron_wrap.init.platform={platform}"]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        return _fit(wrap) if loop is None else loop(wrap)


def run_script(*words: str) -> None:
    """Run a program of the user, the first word, as `__main__`."""
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")


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
    """Make workers that take no part join the next report; returns the value of rank 0."""
    return int(ray.train.collective.broadcast_from_rank_zero(iteration))


def _send(wrap: MegatronWrap, metrics: Mapping[str, float]) -> None:
    ray.train.report(
        dict(metrics),
        checkpoint=_new_checkpoint(wrap.config.train.save),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def _new_checkpoint(save: str | None) -> ray.train.Checkpoint | None:
    """The newest checkpoint on rank 0, unless it was reported last; None elsewhere."""
    if save is None or ray.train.get_context().get_world_rank() != 0:
        return None
    store = CheckpointFolder(os.path.abspath(os.path.expanduser(save)))
    iteration = store.latest()
    path = None if iteration is None else store.find(iteration)
    reported = ray.train.get_checkpoint()
    if path is None or (reported is not None and reported.path == str(path)):
        return None
    return ray.train.Checkpoint.from_directory(str(path))


# ---- workers and ranks ----


def largest_layout(config: RunConfig, workers: int) -> int:
    """The largest number of processes, at most `workers`, that can run the configuration.

    Raises:
        LayoutError: there is none; the error is the one for all workers.
    """
    for number in range(workers, 0, -1):
        with contextlib.suppress(LayoutError):
            check_layout(config, number)
            return number
    check_layout(config, workers)
    raise AssertionError("unreachable: the layout was refused above")


def workers_of_run(config: RunConfig, nodes: Sequence[Hashable]) -> list[int]:
    """Workers that become the ranks 0, 1, ... of the run; the others take no part.

    A tensor-parallel group does not span nodes, where the nodes have room for whole groups.

    Args:
        nodes: node of each worker; the workers of a node are consecutive.

    Raises:
        LayoutError: no number of these workers can run the configuration.
    """
    group = config.parallel.tensor_model_parallel_size
    of_node, seen, inside = Counter(nodes), Counter[Hashable](), []
    for worker, node in enumerate(nodes):
        if seen[node] < of_node[node] // group * group:
            inside.append(worker)
        seen[node] += 1
    # Ray attaches the reports of its first worker, which therefore takes part
    candidates = inside if inside[:1] == [0] else list(range(len(nodes)))
    return candidates[: largest_layout(config, len(candidates))]


@contextlib.contextmanager
def _ranks_of_run(config: RunConfig) -> Iterator[bool]:
    """Give this worker its rank of the run; yields whether it has one. Workers without a rank join the reports, which
    Ray expects from all workers, until the others end."""
    nodes, rank = os.environ[NODES].split(","), ray.train.get_context().get_world_rank()
    workers = workers_of_run(config, nodes)
    if len(workers) == len(nodes):
        yield True
        return
    os.environ["WORLD_SIZE"] = str(len(workers))
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


def _write_to(path: str) -> None:
    """Append the output of this process to a file."""
    sys.stdout.flush(), sys.stderr.flush()
    with open(path, "ab") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
