"""A run whose model is built: its state, and the objects that the methods of `MegatronWrap` delegate to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.reference_config import add_reference_model
from megatron_wrap.checkpoint.run_checkpoints import RunCheckpoints
from megatron_wrap.checkpoint.saved_run import starting_checkpoint
from megatron_wrap.config import RunConfig
from megatron_wrap.core.best_and_early_stop import BestCheckpoint
from megatron_wrap.core.run_data import RunData
from megatron_wrap.core.run_evaluation import RunEvaluation
from megatron_wrap.core.run_export import RunExport
from megatron_wrap.core.run_json import write_run_facts
from megatron_wrap.core.run_training import RunTraining
from megatron_wrap.core.step_reporting import RunRecords, describe_model
from megatron_wrap.core.validation.samples import data_warnings
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.model.chunks import remove_gather_hooks
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.parallel.watch.ending import InterruptWatch
from megatron_wrap.parallel.watch.stop_requests import StopRequests
from megatron_wrap.platform.base.platform import Platform
from megatron_wrap.platform.megatron_core.graphs import delete_graphs
from megatron_wrap.setup.build import build_step_profiler, build_training_state
from megatron_wrap.utils.dist_logger import logger


class Run:
    """Builds the model, and for training the optimizer, with the weights that the run starts from. Collective.

    Args:
        config: the run's configuration in force.
        reference_config: configuration of the reference or teacher model; None: training needs none.
        tokenizer: the run's Hugging Face tokenizer, or None.
        training: False builds only the model.
        save: saves a checkpoint of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        reference_config: RunConfig | None,
        platform: Platform,
        parallel: ParallelState,
        tokenizer: Any,
        training: bool,
        save: Callable[[], Path],
    ) -> None:
        # a run that starts or resumes from a checkpoint uses only the architecture of the Hugging Face folder
        is_new = starting_checkpoint(config) is None
        from_hugging_face = is_new and config.model_provider.hf_path is not None
        self.state: TrainingState = build_training_state(
            config,
            platform,
            parallel,
            tokenizer,
            from_hugging_face=is_new,
            training=training,
            reference=reference_config if training else None,
        )
        if training and reference_config is not None:
            add_reference_model(self.state, reference_config, tokenizer)
        describe_model(self.state)
        if from_hugging_face:
            logger.info_rank_0(f"loaded weights from {config.model_provider.hf_path}")
        if training and parallel.world.rank == 0:
            for warning in data_warnings(config, tokenizer, self.state.shape.vocab_size):
                logger.warning_rank_0(warning)
        self.checkpoints = RunCheckpoints(self.state)
        self._resumed_from = self.checkpoints.restore(weights_only=not training)
        self._must_verify = from_hugging_face and config.model_provider.verify_hf
        self.records = RunRecords(config, self.state.flow.console_metrics)
        self.data = RunData(config, tokenizer)
        self.evaluation = RunEvaluation(self.state, tokenizer, self.records, self.data.evaluation_sets)
        self.export = RunExport(self.state, tokenizer, self.checkpoints, self.records)
        self.training = RunTraining(self.state, self.records, self.checkpoints, save) if training else None
        self._stop: StopRequests | None = None
        self.best = BestCheckpoint(self.state, self.checkpoints, save)

    def begin_records(self, output_dir: Path) -> None:
        """Open the records of a training run. Collective.

        Raises:
            CheckpointError: the model differs from that of its Hugging Face folder (`model_provider.verify_hf`).
            ConfigError: a logger cannot start.
        """
        if self._must_verify:
            self.export.refuse_unverified()
        state = self.state
        profiler = build_step_profiler(state, output_dir) if state.config.profile.steps else None
        self.records.open(state.progress.iteration, self._resumed_from, profiler)
        write_run_facts(state, output_dir, self._resumed_from)

    def begin_stop_requests(self, output_dir: Path, local_rank: int, watch: InterruptWatch | None) -> None:
        """End training after a step on request: a file STOP in the output folder, a time limit, and where there is a
        folder to save into, a signal.

        Args:
            watch: watch of this process's interrupts.
        """
        assert self.training is not None
        train = self.state.config.train
        self._stop = StopRequests(
            output_dir,
            self.state.parallel.world.rank,
            local_rank,
            train.stop_after_minutes,
            train.stop_before_slurm_end_minutes,
        )
        self._stop.begin(signals=train.save is not None, watch=watch)
        self.training.stop_on(self._stop)

    def interrupted(self) -> str:
        """A sentence for a run that Ctrl-C has ended: its progress, and how to continue."""
        return "interrupted" if self.training is None else self.checkpoints.ended("interrupted")

    def close(self) -> None:
        """Finish a save, end the processes that load data and write checkpoints, close the loggers, and restore the
        signal handlers. The model cannot be used afterwards."""
        self.checkpoints.close()
        remove_gather_hooks(self.state.chunks)
        delete_graphs(self.state.chunks)
        self.data.close()
        self.records.close()
        if self._stop is not None:  # last: torchrun's agent sends SIGTERM when another process has ended
            self._stop.close()
