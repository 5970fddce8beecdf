"""Checkpoints: `store` keeps folders, `precheck` looks at them without torch, `save_load` moves a run's state.

The names below are resolved on first use, so that looking at a folder imports neither torch nor Megatron-Core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wrap.checkpoint.precheck import check_checkpoints, compare_models, find_checkpoint
    from megatron_wrap.checkpoint.reference import copy_policy, load_reference, save_reference
    from megatron_wrap.checkpoint.save_load import LoadReport, load_checkpoint, save_checkpoint
    from megatron_wrap.checkpoint.store import CheckpointStore

__all__ = [
    "CheckpointStore",
    "LoadReport",
    "check_checkpoints",
    "compare_models",
    "copy_policy",
    "find_checkpoint",
    "load_checkpoint",
    "load_reference",
    "save_checkpoint",
    "save_reference",
]

_HOMES = {
    "CheckpointStore": "store",
    "LoadReport": "save_load",
    "check_checkpoints": "precheck",
    "compare_models": "precheck",
    "copy_policy": "reference",
    "find_checkpoint": "precheck",
    "load_checkpoint": "save_load",
    "load_reference": "reference",
    "save_checkpoint": "save_load",
    "save_reference": "reference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
