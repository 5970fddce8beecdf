"""Correspondence of a family's configuration and tensors to Megatron-Core's."""

import warnings
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Functions of `tensors`, whose former path is this package's."""
    tensors = import_module("megatron_wrap.bridge.mapping.tensors")
    if name.startswith("_") or not hasattr(tensors, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {tensors.__name__}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(tensors, name)
