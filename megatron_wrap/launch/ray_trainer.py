"""The driver's part of `megatron_wrap.launch.ray`: Ray's trainer for a run, and the number of its workers.

Imports no torch, which takes a second of a start from the shell.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.launch.ray_controller import RankConfig, UserErrors
from megatron_wrap.launch.ray_workers import Work
from megatron_wrap.platform.base.machine import this_machine, visible_gpus

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_SNAPSHOT = "checkpoint_manager_snapshot.json"
"""File with Ray's list of the checkpoints of a run, including those that retention has removed."""

_train: Any = ray.train  # its stubs declare only the classes of Ray Train V1


class Trainer(DataParallelTrainer):
    """Ray's trainer for a run; `fit` raises a user's error as it was raised in a worker.

    Args:
        config: the run's configuration.
        work: function that each worker calls.
        scaling: number and resources of the workers.
        max_failures: restarts after failures of workers.
    """

    def __init__(self, config: RunConfig, work: Work, scaling: ray.train.ScalingConfig, max_failures: int) -> None:
        save = config.train.save
        folder = os.path.join(output_dir(config), "ray") if save is None else os.path.expanduser(save)
        self._folder = Path(os.path.abspath(folder))
        machine = this_machine(config.init.platform)
        connections = cuda_connections(config, machine, os.environ.get(CONNECTIONS)).value
        DataParallelTrainer.__init__(  # not TorchTrainer's, which may be a base class too and starts a process group
            self,
            work,
            backend_config=RankConfig(),
            scaling_config=scaling,
            run_config=_train.RunConfig(
                name=self._folder.name,
                storage_path=str(self._folder.parent),
                failure_config=ray.train.FailureConfig(max_failures=max_failures),
                callbacks=[UserErrors()],
                worker_runtime_env={"env_vars": {CONNECTIONS: str(connections), "PYTHONPATH": _own_paths()}},
            ),
        )

    def _create_default_callbacks(self) -> list[Any]:
        # a run reads its samples without Ray: this saves a process that imports Ray while the workers start
        return [each for each in super()._create_default_callbacks() if type(each).__name__ != "DatasetsCallback"]

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


def torch_trainer(*arguments: Any) -> TorchTrainer:
    """`Trainer` as the class under which programs know Ray's trainers of torch."""
    from ray.train.torch import TorchTrainer

    class TorchRunTrainer(Trainer, TorchTrainer):
        pass

    return TorchRunTrainer(*arguments)


def scaling(config: RunConfig, num_workers: int | tuple[int, int]) -> ray.train.ScalingConfig:
    """Scaling with one process on each CPU or GPU, on as few nodes as possible."""
    gpus = config.init.platform == "cuda"
    if config.init.platform == "auto":
        gpus = bool(ray.cluster_resources().get("GPU") if ray.is_initialized() else visible_gpus())
    result: ray.train.ScalingConfig = _train.ScalingConfig(
        num_workers=num_workers, use_gpu=gpus, placement_strategy="PACK"
    )
    return result


def _own_paths() -> str:
    """Folders for PYTHONPATH from which this process imports modules that are not installed, such as the module of a
    loop or a flow."""
    installed = (sys.prefix, sys.base_prefix)
    folders = [os.path.abspath(folder) for folder in sys.path]
    return os.pathsep.join(dict.fromkeys(folder for folder in folders if not folder.startswith(installed)))
