"""Export of a run's weights under Hugging Face's names: folders, uploads, streams for rollout engines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_wrap.bridge.export.adapted import layers_with_adapters
from megatron_wrap.bridge.export.export_format import ExportFormat, export_format
from megatron_wrap.bridge.export.kept_vision import KeptVision
from megatron_wrap.bridge.export.model_card import write_model_card
from megatron_wrap.bridge.export.save_pretrained import prune_exports, save_adapter, save_pretrained, upload
from megatron_wrap.bridge.export.training_record import TrainingRecord, training_record
from megatron_wrap.bridge.export.weight_stream import WeightStream
from megatron_wrap.bridge.mapping.adapter_targets import adapter_family, peft_config, task_type, tied_copies
from megatron_wrap.checkpoint.files.complete_checkpoints import read_facts
from megatron_wrap.config.schema import derived
from megatron_wrap.core.records import recorded_evaluation
from megatron_wrap.core.run import Run
from megatron_wrap.engine.passes.synchronize_parameters import synchronize_parameters
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import ConfigError
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from megatron_wrap.bridge.engines.rollout_weights import RolloutWeights


def save_folder(
    run: Run,
    folder: str | os.PathLike[str],
    max_shard_size: str | int = "5GB",
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    merge: bool = False,
    keep_vision: bool = False,
) -> Path:
    """Write a Hugging Face folder, or the run's adapter as a peft folder; with a model card if the model was trained
    here. Collective; see `MegatronWrap.save_pretrained`."""
    state, hf_format = run.state, _format(run.state, family)
    vision = KeptVision.of(hf_format) if keep_vision else None
    if state.config.adapter.adapter_type != "none" and not merge:
        if vision is not None:
            raise ConfigError("keep_vision writes a whole model, and an adapter is exported alone; set merge")
        layers = layers_with_adapters(state.config, state.shape.vocab_size)
        settings = state.config.adapter
        values = peft_config(layers, settings, state.config.model_provider.hf_path, task_type(hf_format.family))
        stream = _stream(state, hf_format, dtype, adapter=True)
        copies = tied_copies(hf_format.family.parameters(hf_format.arch), settings)
        kind, target = "adapter", save_adapter(stream, values, state.parallel, folder, run.tokenizer, copies)
    else:
        kind, stream = "Hugging Face folder", _stream(state, hf_format, dtype)
        target = save_pretrained(stream, hf_format, state.parallel, folder, run.tokenizer, max_shard_size, vision)
    on_rank_0(lambda: _write_card(run, target), f"{target}: the model card cannot be written: {{}}")
    iteration = _trained_iterations(run)
    logger.info_rank_0(f"{kind}{'' if iteration is None else f' of iteration {iteration}'}: {target}")
    return target


def save_beside(run: Run, checkpoint: Path) -> None:
    """Write the Hugging Face folder of a checkpoint next to it, and remove the folders of removed checkpoints.
    Collective."""
    state = run.state
    save_folder(run, checkpoint.parent / f"hf_{state.progress.iteration:07d}")
    prune_exports(checkpoint.parent, state.config.checkpoint.keep, state.parallel, state.best.iteration)


def upload_folder(run: Run, folder: Path, repo_id: str, private: bool | None, commit_message: str | None) -> str:
    """Upload a folder of `save_folder` to the hub, and return the URL of the commit. Collective."""
    message = commit_message or f"{run.state.config.name}, iteration {_trained_iterations(run) or 0}"
    return upload(folder, repo_id, private, message)


def weight_source(
    state: TrainingState, dtype: str | torch.dtype | None, family: str | None, adapter: bool
) -> RolloutWeights:
    """The weights for a rollout engine; each pass yields the current ones. Collective."""
    from megatron_wrap.bridge.engines.rollout_weights import RolloutWeights

    hf_format, is_sender = _format(state, family), state.parallel.world.rank == 0
    return RolloutWeights(lambda: _stream(state, hf_format, dtype, adapter), is_sender)


def export_weights(
    state: TrainingState, dtype: str | torch.dtype | None, family: str | None, adapter: bool
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of each weight, or of each factor of the adapter. Collective."""
    yield from _stream(state, _format(state, family), dtype, adapter)


def _trained_iterations(run: Run) -> int | None:
    """Number of steps that the weights were trained for, by this run or by the run that saved the loaded checkpoint;
    None: they are weights of a Hugging Face folder, or initial ones."""
    if run.trains:
        return run.state.progress.iteration
    return None if run.checkpoints.loaded is None else run.checkpoints.loaded[1]


def _write_card(run: Run, folder: Path) -> None:
    config, loaded, iteration = run.state.config, run.checkpoints.loaded, _trained_iterations(run)
    record: TrainingRecord | None = None
    evaluation: tuple[int, Mapping[str, float]] | None = None
    if run.trains:
        record, evaluation = training_record(config), run.records.last_evaluation
    elif loaded is not None:
        record = read_facts(loaded[0]).get("training")
    if record is None or iteration is None:
        return
    if evaluation is None:
        evaluation = recorded_evaluation(record["output_dir"], iteration)
    task = "text-classification" if derived.has_value_head(config) else "text-generation"
    write_model_card(folder, record, iteration, evaluation, task)


def _format(state: TrainingState, family: str | None) -> ExportFormat:
    # vocab_size of the configuration may be null; the state has the tokenizer's
    return export_format(state.config, state.shape.vocab_size, family)


def _stream(
    state: TrainingState, hf_format: ExportFormat, dtype: str | torch.dtype | None, adapter: bool = False
) -> WeightStream:
    overlapped = bool(state.config.ddp.overlap_param_gather) and state.optimizer is not None
    synchronize_parameters(state.chunks, overlapped)
    family = hf_format.family
    if adapter:
        layers = layers_with_adapters(state.config, state.shape.vocab_size)
        family = adapter_family(family, layers, state.config.adapter)
    return WeightStream(
        state.chunks, family, hf_format.arch, state.parallel, state.platform.device, dtype, merge=not adapter
    )
