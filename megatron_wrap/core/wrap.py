"""`MegatronWrap`: the lifecycle of a run, and delegation. The training step is in `megatron_wrap.engine.step`."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.hub import read_run
from megatron_wrap.bridge.start import check_hugging_face, weights_left_out
from megatron_wrap.checkpoint import check_checkpoints
from megatron_wrap.checkpoint.second_model import add_second_model, reference_config
from megatron_wrap.config import RunConfig, derived
from megatron_wrap.config.checks import check_layout, check_run
from megatron_wrap.config.defaults import CONNECTIONS, cuda_connections
from megatron_wrap.config.paths import output_dir
from megatron_wrap.core.fit import FitVerbs
from megatron_wrap.core.hugging_face import HuggingFaceVerbs
from megatron_wrap.core.layout_view import LayoutView
from megatron_wrap.core.loading import LoadingVerbs
from megatron_wrap.core.records import RunRecords, describe_model
from megatron_wrap.core.training import TrainingVerbs
from megatron_wrap.errors import CheckpointError, MegatronWrapError
from megatron_wrap.platform import choose_platform
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.session import LoggerSession

if TYPE_CHECKING:
    from typing_extensions import Self

    from megatron_wrap.checkpoint import RunCheckpoints
    from megatron_wrap.data.indexed import IndexedData
    from megatron_wrap.engine.loader import BatchLoader
    from megatron_wrap.engine.profiling import StepProfiler
    from megatron_wrap.engine.state import TrainingState
    from megatron_wrap.parallel.launch import Processes
    from megatron_wrap.parallel.state import ParallelState


class MegatronWrap(LoadingVerbs, TrainingVerbs, FitVerbs, HuggingFaceVerbs, LayoutView):
    """A run: `initialize()`, `setup_model_and_optimizer()`, then `train(batch)` and `log_last_metrics()` in your own
    loop, and `save()`.

    Args:
        config: path of the run's YAML, or an already decoded `RunConfig`.
        overrides: `a.b.c=value` strings; they take precedence over the YAML.

    The constructor only reads and validates the configuration.

    Raises:
        ConfigError, LayoutError, DataError, CheckpointError: the configuration is wrong; the message has file and line.
    """

    def __init__(self, config: str | os.PathLike[str] | RunConfig, overrides: Sequence[str] = ()) -> None:
        self.config = config if isinstance(config, RunConfig) else read_run(config, overrides)
        check_run(self.config)
        check_checkpoints(self.config)
        check_hugging_face(self.config)
        self._reference_config = reference_config(self.config)
        self._session: LoggerSession | None = None
        self._processes: Processes | None = None
        self._parallel: ParallelState | None = None
        self._state: TrainingState | None = None
        self._checkpoints: RunCheckpoints | None = None
        self._loaders: list[BatchLoader] = []
        self._indexed: IndexedData | None = None
        self._records = RunRecords(self.config, self.output_dir)
        self._resumed_from: int | None = None
        self._started_from_hugging_face = False
        self.platform = choose_platform(self.config.init.platform)
        self.tokenizer: Any = None

    # ---- lifecycle ----

    def initialize(self) -> None:
        """Start the platform, torch.distributed, the model-parallel groups, seeds and logging. Collective.

        Raises:
            LayoutError: the number of processes does not fit the layout.
        """
        if self._parallel is not None:
            return
        from megatron_wrap.parallel import launch

        settings = self.config.logger
        self._session = LoggerSession(
            rank=launch.environment_rank(),
            patch_print=settings.patch_print,
            remove_logging=settings.remove_logging,
            ignore_warning=settings.ignore_warning,
        ).open()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        from megatron_wrap.engine.build import seed_everything
        from megatron_wrap.parallel import launch
        from megatron_wrap.parallel.state import build_parallel_state

        timeout = self.config.init.distributed_timeout_minutes
        check_layout(self.config, launch.environment_world_size())
        self.platform.install({CONNECTIONS: str(cuda_connections(self.config, os.environ.get(CONNECTIONS)).value)})
        self._processes = launch.start(self.platform.backend, self.platform.device, timeout)
        check_layout(self.config, self._processes.world_size)
        self._parallel = build_parallel_state(self.config.parallel, derived.virtual_pipeline_size(self.config), timeout)
        seed_everything(self.config.train.seed, self._parallel)
        logger.info_rank_0(
            f"{self.config.name}: {self._processes.world_size} processes on {self.platform.name} over "
            f"{self.platform.backend}, layout {self._parallel.layout}"
        )

    def setup_model_and_optimizer(self) -> None:
        """Build model, optimizer and schedule; then resume from `save`, or start from `load`, or from initial weights.

        Collective over all ranks.

        Raises:
            PlatformError: Megatron-Core cannot build this model on this platform. CheckpointError: see `load`.
        """
        self._set_up(training=True)
        if self._started_from_hugging_face and self.config.model_provider.verify_hf:
            self._refuse_unverified()
        self._records.open(self.iteration, self._resumed_from, self._step_profiler())
        from megatron_wrap.core.run_facts import write_run_facts

        write_run_facts(self._ready(), self.output_dir, self._resumed_from)

    def setup_model(self) -> None:
        """Build only the model, with the weights that training would start from, to evaluate, inspect or export it.
        Collective.

        Without gradient buffers and optimizer it needs a third of the memory or less. `train` and `save` require
        `setup_model_and_optimizer`.
        """
        self._set_up(training=False)

    def _set_up(self, training: bool) -> None:
        parallel = self._initialized()
        from megatron_wrap.checkpoint import RunCheckpoints, has_checkpoint
        from megatron_wrap.checkpoint.choices import decided
        from megatron_wrap.engine.build import build_training_state

        if self.config.data.tokenizer is not None:
            from megatron_wrap.data.tokenizer import load_tokenizer

            self.tokenizer = load_tokenizer(self.config.data.tokenizer)
        if training:
            self.config = decided(self._with_counted_steps(parallel), self.platform, parallel)
            self._records = RunRecords(self.config, self.output_dir)
        # a run that starts or resumes from a checkpoint uses only the architecture of the Hugging Face folder
        from_hugging_face = self.config.model_provider.hf_path is not None and not has_checkpoint(self.config)
        self._state = build_training_state(
            self.config,
            self.platform,
            parallel,
            self.tokenizer,
            from_hugging_face=from_hugging_face,
            training=training,
        )
        if training and self._reference_config is not None:
            add_second_model(self._state, self._reference_config, self.tokenizer)
        self._started_from_hugging_face = from_hugging_face
        describe_model(self._state)
        if from_hugging_face:
            logger.info_rank_0(f"loaded weights from {self.config.model_provider.hf_path}")
            for text in weights_left_out(self.config):
                logger.warning_rank_0(text)
        self._checkpoints = RunCheckpoints(self._state)
        self._resumed_from = self._checkpoints.restore(weights_only=not training)

    def close(self) -> None:
        """End the processes that load data, close loggers, destroy the process groups that this object created, and
        undo the changes of `initialize` to the host program."""
        self._close_loaders()
        self._records.close()
        self._state = self._checkpoints = None
        if self._parallel is not None:
            from megatron_wrap.parallel.state import destroy_parallel_state

            destroy_parallel_state()
            self._parallel = None
            # model, hooks, optimizer and process groups form reference cycles
            gc.collect()
        if self._processes is not None:
            from megatron_wrap.parallel import launch

            launch.stop(self._processes)
            self._processes = None
        self.platform.uninstall()
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- checkpoints ----

    def save(self) -> Path:
        """Save everything that a resumed run needs, into `megatron_lm.train.common.save`. Collective.

        Returns:
            The checkpoint's folder. Saving the same iteration again writes nothing.
        """
        state = self._trainable()
        if self.config.train.save is None:
            raise CheckpointError("wrap.save: megatron_lm.train.common.save is null; set it to a folder")
        folder = self._run_checkpoints().save(self.config.train.save)
        logger.info_rank_0(
            f"checkpoint of iteration {self.iteration}: {folder} | metrics: {self.output_dir}/metrics.jsonl"
        )
        if self.config.checkpoint.export_hf:
            from megatron_wrap.bridge.export import prune_exports

            self.save_pretrained(folder.parent / f"hf_{self.iteration:07d}")
            prune_exports(folder.parent, self.config.checkpoint.keep, state.parallel, state.best.iteration)
        return folder

    def load(self, folder: str | os.PathLike[str] | None = None, weights_only: bool = False) -> None:
        """Load a checkpoint of this model, saved on any layout, and the reference model saved with it. Collective.

        Args:
            folder: a checkpoint folder (the newest checkpoint is loaded) or one checkpoint; default: `save`, else
                `load` of the configuration.
            weights_only: do not load iteration, optimizer, schedule, random generators and reference model.

        Raises:
            CheckpointError: the checkpoint is missing, in an unsupported format, or from another model.
        """
        folder = folder or self.config.train.save or self.config.train.load
        if folder is None:
            raise CheckpointError("wrap.load: there is no folder; pass one, or set megatron_lm.train.common.load")
        self._run_checkpoints().load(folder, weights_only)

    # ---- state ----

    @property
    def iteration(self) -> int:
        """Number of steps taken, including those before a resume."""
        return self._ready().progress.iteration

    @property
    def train_iters(self) -> int:
        """Number of steps of the run; of one given in epochs after the setup."""
        train = self.config.train
        if train.train_iters is None and train.train_samples is None:
            raise MegatronWrapError("train_epochs: call wrap.setup_model_and_optimizer() first, which counts the steps")
        return derived.train_iters(self.config)

    @property
    def consumed_samples(self) -> int:
        """Number of samples trained on."""
        return self._ready().progress.consumed_samples

    @property
    def global_batch_size(self) -> int:
        """Samples of the next `train` call; grows during a batch size ramp-up."""
        return self._ready().global_batch_size

    @property
    def output_dir(self) -> Path:
        """Folder of metrics.jsonl and the run's other records."""
        return Path(output_dir(self.config))

    @property
    def state(self) -> TrainingState:
        """The run's training state, for tools that inspect it."""
        return self._ready()

    # ---- internal ----

    def _initialized(self) -> ParallelState:
        if self._parallel is None:
            raise MegatronWrapError("call wrap.initialize() first")
        return self._parallel

    def _ready(self) -> TrainingState:
        if self._state is None:
            raise MegatronWrapError("call wrap.initialize() and wrap.setup_model_and_optimizer() first")
        return self._state

    def _trainable(self) -> TrainingState:
        state = self._ready()
        if state.optimizer is None:
            raise MegatronWrapError("setup_model builds no optimizer; call wrap.setup_model_and_optimizer() instead")
        return state

    def _run_checkpoints(self) -> RunCheckpoints:
        if self._checkpoints is None:
            raise MegatronWrapError("call wrap.initialize() and wrap.setup_model_and_optimizer() first")
        return self._checkpoints

    def _step_profiler(self) -> StepProfiler | None:
        if not self.config.profile.steps:
            return None
        from megatron_wrap.engine.profiling import step_profiler

        return step_profiler(self._ready(), self.output_dir)
