"""Checkpoint of the reference model, saved once per run, because it never changes. All functions are collective."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_wrap.checkpoint import content
from megatron_wrap.checkpoint.save_load import SavedContent, check_tensors, examine, publish
from megatron_wrap.checkpoint.store import CheckpointStore
from megatron_wrap.checkpoint.strategy import FAILURES, read
from megatron_wrap.engine.reference import ReferenceModel
from megatron_wrap.engine.state import BestEvaluation, Progress, TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.parallel.agreement import agreed, on_rank_0

FOLDER = "reference"
"""Subfolder of the run's checkpoint folder; it contains one checkpoint, of iteration 0, with weights only."""


def save_reference(state: TrainingState, folder: str | os.PathLike[str]) -> None:
    """Save the reference model in the checkpoint folder `folder`.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    reference = _of(state)
    publish(
        state,
        CheckpointStore(Path(folder) / FOLDER),
        iteration=0,
        sharded_state=lambda: {
            **content.common_entries(Progress(), BestEvaluation()),
            **content.model_entries(reference.chunks, state.parallel),
        },
    )


def load_reference(state: TrainingState, folder: str | os.PathLike[str]) -> bool:
    """Load the reference model from the checkpoint folder `folder`; it may have been saved on another layout.

    Args:
        folder: a run's checkpoint folder, or one checkpoint in it.

    Returns:
        False if there is none.

    Raises:
        CheckpointError: on every rank, if it is incomplete or from another model.
    """
    reference = _of(state)
    candidates = [Path(folder) / FOLDER, Path(folder).parent / FOLDER]
    found = on_rank_0(lambda: next((str(path) for path in candidates if CheckpointStore(path).present()), None))
    if found is None:
        return False
    saved: SavedContent = on_rank_0(lambda: examine(found, state.config, state.shape.vocab_size), failures=FAILURES)
    request: dict[str, Any] = saved.readable(content.model_entries(reference.chunks, state.parallel))
    check_tensors(saved, request)
    with torch.no_grad(), agreed(f"reference model {saved.path} cannot be loaded: {{}}", FAILURES):
        content.load_model(reference.chunks, read(request, saved.path, state.parallel.dp_cp.group))
    return True


def copy_policy(reference: ReferenceModel, policy: Sequence[Any]) -> None:
    """Copy the policy's weights into the reference model; the policy's parameters must be synchronized."""
    with torch.no_grad():
        for target, source in zip(reference.chunks, policy, strict=True):
            bare_model(target).load_state_dict(bare_model(source).state_dict())


def _of(state: TrainingState) -> ReferenceModel:
    if state.reference is None:
        raise CheckpointError("the run has no reference model; set megatron_wrap.models.reference")
    return state.reference
