"""A run whose model is built: its training state, samples, records and checkpoints, from the setup to the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.bridge.adapters.trained_parameters import describe_adapter
from megatron_wrap.checkpoint.reference_config import add_reference_model
from megatron_wrap.checkpoint.run_checkpoints import RunCheckpoints
from megatron_wrap.checkpoint.saved_run import starting_checkpoint
from megatron_wrap.config import RunConfig
from megatron_wrap.core.records import RunRecords, write_run_json
from megatron_wrap.core.run_data import RunData
from megatron_wrap.core.validation.samples import data_warnings
from megatron_wrap.data.chat.encode import prompt_token_ids
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.evaluation.verify import verify_hugging_face
from megatron_wrap.model.chunks import remove_gather_hooks, weight_lines
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
    """

    def __init__(
        self,
        config: RunConfig,
        reference_config: RunConfig | None,
        platform: Platform,
        parallel: ParallelState,
        tokenizer: Any,
        training: bool,
    ) -> None:
        # a run that starts or resumes from a checkpoint uses only the architecture of the Hugging Face folder
        is_new = starting_checkpoint(config) is None
        from_hugging_face = is_new and config.model_provider.hf_path is not None
        self.trains, self.tokenizer = training, tokenizer
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
        _describe_model(self.state)
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
        for prompt in config.train.sample_prompts or ():  # a mistake is found before the first step
            prompt_token_ids(tokenizer, prompt, self.state.shape.vocab_size)
        self.stop: StopRequests | None = None
        """Requests to end the training; None before `begin_training`."""

    def begin_training(self, output_dir: Path, local_rank: int, watch: InterruptWatch | None) -> None:
        """Open the records, and let the run end after a step on request: a file STOP in the output folder, a time
        limit, and where there is a folder to save into, a signal. Collective.

        Args:
            watch: watch of this process's interrupts.

        Raises:
            CheckpointError: the model differs from that of its Hugging Face folder (`model_provider.verify_hf`).
            ConfigError: a logger cannot start.
        """
        state, train = self.state, self.state.config.train
        if self._must_verify:
            _refuse_unverified(state, self.tokenizer)
        profiler = build_step_profiler(state, output_dir) if state.config.profile.steps else None
        self.records.open(state.progress.iteration, self._resumed_from, profiler)
        write_run_json(state, output_dir, self._resumed_from)
        self.stop = StopRequests(
            output_dir,
            state.parallel.world.rank,
            local_rank,
            train.stop_after_minutes,
            train.stop_before_slurm_end_minutes,
        )
        self.stop.begin(signals=train.save is not None, watch=watch)
        state.stop_requested = self.stop.pending

    def interrupted(self) -> str:
        """A sentence for a run that Ctrl-C has ended: its progress, and how to continue."""
        return self.checkpoints.ended("interrupted") if self.trains else "interrupted"

    def close(self) -> None:
        """Finish a save, end the processes that load data and write checkpoints, close the loggers, and restore the
        signal handlers. The model cannot be used afterwards."""
        self.checkpoints.close()
        remove_gather_hooks(self.state.chunks)
        delete_graphs(self.state.chunks)
        self.data.close()
        self.records.close()
        if self.stop is not None:  # last: torchrun's agent sends SIGTERM when another process has ended
            self.stop.close()


def _describe_model(state: TrainingState) -> None:
    """Log the flow and the size of the model, and each weight with `show_weight_details`."""
    local = sum(parameter.numel() for chunk in state.chunks for parameter in chunk.parameters())
    logger.info_rank_0(f"{state.flow}; {local:,} parameters on rank 0")
    adapter = run_adapter(state.config, state.shape.vocab_size)
    if adapter is not None:
        logger.info_rank_0(describe_adapter(adapter, state.shape.vocab_size))
    if state.config.model_provider.show_weight_details:
        for line in weight_lines(state.chunks):
            logger.info_all_ranks(line)


def _refuse_unverified(state: TrainingState, tokenizer: Any) -> None:
    """Compare the model with transformers', and log the verdict. Collective.

    Raises:
        CheckpointError: the models differ.
    """
    verdict = verify_hugging_face(state, tokenizer)
    logger.info_rank_0(verdict.table())
    if not verdict.agrees:
        raise CheckpointError(
            f"megatron_wrap.model_provider.verify_hf: the model differs from that of {verdict.folder}: "
            f"{verdict.first_difference}; nothing was trained"
        )
