"""Export of a run's weights under Hugging Face's names: folders, uploads, streams for rollout engines, verification."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.bridge.adapters.run_adapter import RunAdapter, adapter_of
from megatron_wrap.bridge.adapters.target_modules import tied_copies
from megatron_wrap.bridge.engines.rollout_weights import RolloutWeights
from megatron_wrap.bridge.export.export_format import ExportFormat, export_format
from megatron_wrap.bridge.export.model_card import TrainingRecord, training_record, write_model_card
from megatron_wrap.bridge.export.save_pretrained import KeptVision, prune_exports, save_adapter, save_pretrained, upload
from megatron_wrap.bridge.export.weight_stream import WeightStream
from megatron_wrap.checkpoint.files.run_folder import read_manifest
from megatron_wrap.checkpoint.run_checkpoints import RunCheckpoints
from megatron_wrap.config.schema import derived
from megatron_wrap.core.run_json import recorded_evaluation
from megatron_wrap.core.step_reporting import RunRecords
from megatron_wrap.engine.passes.parameters import synchronize_parameters
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import CheckpointError, ConfigError
from megatron_wrap.evaluation.verify import verify_hugging_face
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.utils.dist_logger import logger


class RunExport:
    """Exports the current weights; `MegatronWrap` has the same methods.

    Args:
        state: training state of the run.
        tokenizer: the run's Hugging Face tokenizer, written with the weights; or None.
        checkpoints: checkpoints of the run.
        records: records of the run.
    """

    def __init__(self, state: TrainingState, tokenizer: Any, checkpoints: RunCheckpoints, records: RunRecords) -> None:
        self._state, self._tokenizer, self._checkpoints, self._records = state, tokenizer, checkpoints, records

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        max_shard_size: str | int = "5GB",
        dtype: str | torch.dtype | None = None,
        family: str | None = None,
        merge: bool = False,
        keep_vision: bool = False,
    ) -> Path:
        """Write a Hugging Face folder, or the run's adapter as a peft folder; with a model card if the model was
        trained here."""
        state, hf_format = self._state, self._format(family)
        vision = KeptVision.of(hf_format) if keep_vision else None
        if state.config.adapter.adapter_type != "none" and not merge:
            if vision is not None:
                raise ConfigError("keep_vision writes a whole model, and an adapter is exported alone; set merge")
            kind, target = "adapter", self._save_adapter(folder, hf_format, dtype)
        else:
            kind, stream = "Hugging Face folder", self._stream(hf_format, dtype)
            target = save_pretrained(stream, hf_format, state.parallel, folder, self._tokenizer, max_shard_size, vision)
        on_rank_0(lambda: self._write_card(target), f"{target}: the model card cannot be written: {{}}")
        iteration = self._iteration
        logger.info_rank_0(f"{kind}{'' if iteration is None else f' of iteration {iteration}'}: {target}")
        return target

    def _save_adapter(
        self, folder: str | os.PathLike[str], hf_format: ExportFormat, dtype: str | torch.dtype | None
    ) -> Path:
        state, config = self._state, self._state.config
        adapter = adapter_of(hf_format, config.adapter)
        values = adapter.peft_config(config.model_provider.hf_path)
        stream = self._stream(hf_format, dtype, adapter)
        copies = tied_copies(hf_format.parameters, adapter.saved)
        return save_adapter(stream, values, state.parallel, folder, self._tokenizer, copies)

    @property
    def _iteration(self) -> int | None:
        """Number of steps that the weights were trained for, by this run or by the run that saved the loaded
        checkpoint; None: they are weights of a Hugging Face folder, or initial ones."""
        if self._state.optimizer is not None:
            return self._state.progress.iteration
        return None if self._checkpoints.loaded is None else self._checkpoints.loaded[1]

    def _write_card(self, folder: Path) -> None:
        loaded, iteration = self._checkpoints.loaded, self._iteration
        record: TrainingRecord | None = None
        evaluation: tuple[int, Mapping[str, float]] | None = None
        if self._state.optimizer is not None:
            record, evaluation = training_record(self._state.config), self._records.last_evaluation
        elif loaded is not None:
            record = read_manifest(loaded[0]).get("training")
        if record is None or iteration is None:
            return
        if evaluation is None:
            evaluation = recorded_evaluation(record["output_dir"], iteration)
        task = "text-classification" if derived.has_value_head(self._state.config) else "text-generation"
        write_model_card(folder, record, iteration, evaluation, task)

    def save_beside(self, checkpoint: Path) -> None:
        """Write the Hugging Face folder of a checkpoint next to it, and remove the folders of removed checkpoints.
        Collective."""
        state = self._state
        self.save_pretrained(checkpoint.parent / f"hf_{state.progress.iteration:07d}")
        prune_exports(checkpoint.parent, state.config.checkpoint.keep, state.parallel, state.best.iteration)

    def export_weights(
        self, dtype: str | torch.dtype | None, family: str | None, adapter: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of each weight, or of each factor of the adapter."""
        hf_format = self._format(family)
        yield from self._stream(hf_format, dtype, self._adapter(hf_format) if adapter else None)

    def weight_source(self, dtype: str | torch.dtype | None, family: str | None, adapter: bool) -> RolloutWeights:
        """The weights for a rollout engine."""
        hf_format, is_sender = self._format(family), self._state.parallel.world.rank == 0
        factors = self._adapter(hf_format) if adapter else None
        return RolloutWeights(lambda: self._stream(hf_format, dtype, factors), is_sender)

    def upload(self, folder: Path, repo_id: str, private: bool | None, commit_message: str | None) -> str:
        """Upload a folder of `save_pretrained` to the hub, and return the URL of the commit."""
        message = commit_message or f"{self._state.config.name}, iteration {self._iteration or 0}"
        return upload(folder, repo_id, private, message)

    def refuse_unverified(self) -> None:
        """Compare the model with transformers', and log the verdict. Collective.

        Raises:
            CheckpointError: the models differ.
        """
        verdict = verify_hugging_face(self._state, self._tokenizer)
        logger.info_rank_0(verdict.table())
        if not verdict.agrees:
            raise CheckpointError(
                f"megatron_wrap.model_provider.verify_hf: the model differs from that of {verdict.folder}: "
                f"{verdict.first_difference}; nothing was trained"
            )

    def _format(self, family: str | None) -> ExportFormat:
        # vocab_size of the configuration may be null; the state has the tokenizer's
        return export_format(self._state.config, self._state.shape.vocab_size, family)

    def _adapter(self, hf_format: ExportFormat) -> RunAdapter:
        return adapter_of(hf_format, self._state.config.adapter)

    def _stream(
        self, hf_format: ExportFormat, dtype: str | torch.dtype | None, adapter: RunAdapter | None = None
    ) -> WeightStream:
        """The factors of `adapter`; None: the whole model, with its adapter merged."""
        state = self._state
        overlapped = bool(state.config.ddp.overlap_param_gather) and state.optimizer is not None
        synchronize_parameters(state.chunks, overlapped)
        family = hf_format.family if adapter is None else adapter.family()
        merge = adapter is None and state.config.adapter.adapter_type != "none"
        return WeightStream(state.chunks, family, hf_format.arch, state.parallel, state.platform.device, dtype, merge)
