"""Runs under Ray: `trainer` returns Ray Train's `TorchTrainer` for a configuration. Importing it needs no Ray."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.config.checks.process_count import check_layout
from megatron_wrap.config.schema.derived import processes_needed
from megatron_wrap.core.validation import validate
from megatron_wrap.errors import LayoutError, PlatformError
from megatron_wrap.launch.ray_ranks import largest_layout

if TYPE_CHECKING:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    from megatron_wrap.core import MegatronWrap


def trainer(
    config: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    loop: Callable[[MegatronWrap], Any] | None = None,
    script: Sequence[str] | None = None,
    num_workers: int | tuple[int, int] | None = None,
    scaling_config: ScalingConfig | None = None,
    max_failures: int = 3,
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
        num_workers: processes; (least, most): elastic, as many as the cluster has room for, of which take part as many
            as the layout and the batch allow. Default: the fewest that can run the configuration.
        scaling_config: of Ray Train, instead of `num_workers`.
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
        most = largest_layout(run, most)
    else:
        check_layout(run, most)
    validate(run, most, own_script=script is not None)
    work: ray_workers.Work
    if script is not None:
        work = ray_workers.Script(run, tuple(script), logs=logs)
    else:
        work = ray_workers.WrapLoop(
            os.path.abspath(config), tuple(overrides), loop, bool(scaling_config.use_gpu), logs=logs
        )
    return ray_trainer.torch_trainer(run, work, scaling_config, max_failures)


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
