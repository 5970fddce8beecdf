"""Checkpoints of the reference or teacher model beside those of the run, in the subfolder REFERENCE. They contain
weights only. There is one of iteration 0 if the model never changes, else one for each checkpoint of the run, with the
same iteration. All functions but `prune_references` are collective."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megatron_wrap.checkpoint import saved_tensors
from megatron_wrap.checkpoint.files.run_folder import REFERENCE, CheckpointStore, content_damage
from megatron_wrap.checkpoint.load import DamagedCheckpoint, SavedContent, check_tensors, examine, read_verified
from megatron_wrap.checkpoint.save import FAILURES, RunRecord, publish
from megatron_wrap.engine.passes.reference_model import ReferenceModel
from megatron_wrap.engine.state.state import BestEvaluation, Progress, TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import agreed, on_rank_0


def is_saved(reference: ReferenceModel) -> bool:
    """Whether the run's checkpoints include the model; a model that never changes is loaded from its own folder."""
    return reference.settings.source == "copy" or reference.settings.update_interval is not None


def saved_iteration(reference: ReferenceModel, progress: Progress) -> int:
    """The iteration under which the model is saved with a run's checkpoint."""
    return 0 if reference.settings.update_interval is None else progress.iteration


def save_reference(state: TrainingState, folder: str | os.PathLike[str], record: RunRecord) -> None:
    """Save the reference model in the checkpoint folder `folder`.

    Args:
        record: of the run.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    reference = _of(state)
    with reference.as_saved():
        publish(
            state,
            CheckpointStore(Path(folder) / REFERENCE),
            iteration=saved_iteration(reference, state.progress),
            sharded_state=lambda: {
                **saved_tensors.common_entries(Progress(), BestEvaluation()),
                **saved_tensors.model_entries(reference.chunks, state.parallel),
            },
            record=record,
        )


def prune_references(folder: str | os.PathLike[str], keep: int | None, best: int | None) -> None:
    """Remove the models of checkpoints that were removed; on global rank 0, without communication.

    Args:
        best: iteration of the checkpoint with the best evaluation.
    """
    CheckpointStore(Path(folder) / REFERENCE).prune(keep, best)


def load_reference(state: TrainingState, folder: str | os.PathLike[str]) -> bool:
    """Load the reference model that was saved with the checkpoint in `state`, on any layout.

    Args:
        folder: a run's checkpoint folder, or one checkpoint in it.

    Returns:
        False if there is none.

    Raises:
        CheckpointError: on every rank, if it is incomplete or from another model.
    """
    iteration = saved_iteration(_of(state), state.progress)
    stores = [CheckpointStore(Path(folder) / REFERENCE), CheckpointStore(Path(folder).parent / REFERENCE)]

    def find() -> str | None:
        candidates = (store for store in stores if iteration in store.present())
        return next((str(store.find(iteration) or store.folder_of(iteration)) for store in candidates), None)

    checkpoint = on_rank_0(find)
    if checkpoint is None:
        return False
    load_weights(state, checkpoint)
    return True


def load_weights(state: TrainingState, folder: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint, saved on any layout, into the reference model.

    Args:
        folder: a run's checkpoint folder (the newest checkpoint is loaded) or one checkpoint.

    Raises:
        CheckpointError: on every rank, if it is missing, incomplete or from another model.
    """
    reference = _of(state)
    saved: SavedContent = on_rank_0(lambda: examine(folder, reference.config, reference.vocab_size), failures=FAILURES)
    with reference.as_saved(loading=True):
        request: dict[str, Any] = saved.readable(saved_tensors.model_entries(reference.chunks, state.parallel))
        check_tensors(saved, request)
        loaded = read_verified(request, saved.path, state.parallel.dp_cp.group, state.platform.device, whole=True)
        with torch.no_grad(), agreed(f"reference model {saved.path} cannot be loaded: {{}}", FAILURES):
            saved_tensors.load_model(reference.chunks, loaded)


def load_first_weights(state: TrainingState, folder: str | os.PathLike[str]) -> None:
    """`load_weights` of the checkpoint that the configuration names. An older checkpoint does not replace a damaged
    one, because it would be another reference.

    Raises:
        CheckpointError: as `load_weights`; about a damaged checkpoint it names the newest undamaged one of the folder.
    """
    root = Path(folder).expanduser()
    damaged = on_rank_0(lambda: CheckpointStore(root).passed_over())
    if damaged:
        path = max(damaged)
        raise CheckpointError(on_rank_0(lambda: _damaged(state, path, damaged[path])))
    try:
        load_weights(state, folder)
    except DamagedCheckpoint as error:
        path, reason = error.path, error.reason
        raise CheckpointError(on_rank_0(lambda: _damaged(state, path, reason))) from error


def _damaged(state: TrainingState, path: Path, reason: str) -> str:
    """The message about a damaged checkpoint; on rank 0."""
    models, store = state.config.models, CheckpointStore(path.parent)
    candidates = [store.folder_of(iteration) for iteration in reversed(store.iterations())]
    whole = next((folder for folder in candidates if folder != path and content_damage(folder) is None), None)
    other = "" if whole is None else f", or set {models.path}.checkpoint to {whole}, the newest whole one there"
    return f"the {models.role} model's checkpoint {path} is damaged: {reason}; restore it{other}"


def _of(state: TrainingState) -> ReferenceModel:
    if state.reference is None:
        raise CheckpointError("the run has no reference model; set megatron_wrap.models.reference")
    return state.reference
