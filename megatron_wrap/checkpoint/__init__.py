"""Checkpoints: `store` manages the folders, `precheck` validates them without torch, `save_load` writes and reads a
run's state, `resume` chooses the checkpoint that a run starts from.

The names below are resolved on first use, so that inspecting a folder imports neither torch nor Megatron-Core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wrap.checkpoint.precheck import check_checkpoints, compare_models, find_checkpoint
    from megatron_wrap.checkpoint.resume import RunCheckpoints, has_checkpoint
    from megatron_wrap.checkpoint.save_load import LoadReport, load_checkpoint, save_checkpoint
    from megatron_wrap.checkpoint.store import CheckpointStore

__all__ = [
    "CheckpointStore",
    "LoadReport",
    "RunCheckpoints",
    "check_checkpoints",
    "compare_models",
    "find_checkpoint",
    "has_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]

_SUBMODULES = {
    "CheckpointStore": "store",
    "LoadReport": "save_load",
    "RunCheckpoints": "resume",
    "check_checkpoints": "precheck",
    "compare_models": "precheck",
    "find_checkpoint": "precheck",
    "has_checkpoint": "resume",
    "load_checkpoint": "save_load",
    "save_checkpoint": "save_load",
}


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_SUBMODULES[name]}"), name)
