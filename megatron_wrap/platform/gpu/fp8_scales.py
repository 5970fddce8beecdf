"""Scales of the FP8 recipe `delayed`, in checkpoints and in the memory that Transformer Engine keeps for the process.

Transformer Engine stores them as a pickle, and from 2.20 on reads it only if an environment variable permits any pickle
(pytorch/_extra_state.py). Here a pickle is read if it creates nothing but Transformer Engine's recipe and tensors.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_wrap.errors import CheckpointError
from megatron_wrap.platform.megatron_core import restricted_pickle
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

RECIPES = "transformer_engine.common.recipe"
_EXTENDED = ("megatron.core.extensions.transformer_engine", "TEDelayedScaling")  # Megatron-Core's subclass of a recipe
_PERMISSION = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@contextlib.contextmanager
def readable_scales(states: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Let Transformer Engine read these extra states of its modules.

    Args:
        states: names and extra states of a checkpoint; a tensor of bytes or a BytesIO contains a pickle.

    Raises:
        CheckpointError: a pickle creates or calls anything but a recipe and its tensors.
    """
    for name, state in states:
        if isinstance(state, io.BytesIO) or getattr(state, "numel", lambda: 0)():
            _check(name, state)
    with Replacements() as replacements:
        replacements.keep_item(os.environ, _PERMISSION)
        os.environ[_PERMISSION] = "1"
        yield


def forget_scales() -> None:
    """Forget the scales of `delayed`, which Transformer Engine otherwise keeps and updates for the rest of the
    process."""
    for name in ("quantization", "fp8"):  # the module's newer and older name
        manager = getattr(sys.modules.get(f"transformer_engine.pytorch.{name}"), "FP8GlobalStateManager", None)
        if manager is not None:
            manager.reset()
            return


def _check(name: str, state: Any) -> None:
    try:
        if isinstance(state, io.BytesIO):  # older versions of Transformer Engine read it with torch.load
            restricted_pickle.torch_load(io.BytesIO(state.getvalue()))
            return
        restricted_pickle.load(io.BytesIO(state.detach().cpu().numpy().tobytes()), _known)
    except Exception as error:
        raise CheckpointError(
            f"{name} of the checkpoint is not the state of an FP8 recipe: {error}; a checkpoint must come from a "
            "training run that you trust"
        ) from error


def _known(module: str, name: str) -> Any:
    """The class or function that a name means in the pickle of a recipe and its tensors; None for any other name."""
    from torch._utils import _rebuild_tensor_v2

    known = {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
        ("torch.storage", "_load_from_bytes"): _storage,
        ("megatron.core.safe_globals", "safe_load_from_bytes"): _storage,  # it replaces torch's
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("builtins", "getattr"): restricted_pickle.enum_member,  # a member of an enumeration
    }
    if (module, name) in known:
        return known[module, name]
    if (module, name) == _EXTENDED or (module == RECIPES and "." not in name):
        recipe = getattr(importlib.import_module(module), name, None)
        if isinstance(recipe, type) and recipe.__module__ == module:
            return recipe
    return None


def _storage(content: bytes) -> Any:
    return restricted_pickle.torch_load(io.BytesIO(content))
