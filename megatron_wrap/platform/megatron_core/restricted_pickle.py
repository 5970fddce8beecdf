"""Reading of pickles that may create the objects of one format and nothing else, so that a pickle cannot run its own
code."""

from __future__ import annotations

import collections
import contextlib
import enum
import importlib
import os
import pathlib
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from megatron_wrap.errors import CheckpointError

Names = Mapping[tuple[str, str], Any]
"""(module, name) in a pickle -> the class or function that replaces it."""


class RefusedName(pickle.UnpicklingError):
    """A pickle refers to a class or function that its format does not have."""


def load(file: IO[bytes], names: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The object in a pickle.

    Args:
        names: returns the class or function for (module, name); None if the format does not have it.
        persistent: returns the object for a persistent id; None: the format does not have them.

    Raises:
        RefusedName: the pickle refers to another class or function, which was not called; or it changes a class.
    """
    unpickler = _Unpickler(file, names, persistent)
    try:
        content = unpickler.load()
    finally:
        changed = unpickler.undo_changes()
    if changed is not None:
        raise RefusedName(f"it asks for a change of {changed}")
    return content


def plain_names() -> Names:
    """Classes and functions that pickles of plain values refer to besides the classes of their format."""
    paths = {
        (module, name): getattr(pathlib, name)
        for module in ("pathlib", "pathlib._local")  # the module's name in Python 3.13
        for name in ("PosixPath", "PurePosixPath", "PureWindowsPath")
    }
    return {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("builtins", "set"): set,
        ("builtins", "frozenset"): frozenset,
        ("builtins", "getattr"): enum_member,  # how some versions of Python pickle a member of an enumeration
        **paths,
    }


def enum_member(owner: Any, name: str) -> Any:
    """A member of an enumeration; unlike `getattr`, it refuses other classes."""
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum)):
        raise RefusedName(f"it reads the attribute {name} of {owner}")
    return owner[name]


def checkpoint_metadata(file: IO[bytes]) -> Any:
    """The `.metadata` of torch's distributed format, as torch and Megatron-Core write it.

    Raises:
        RefusedName: see `load`.
        pickle.UnpicklingError: it contains something else.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata

    known = {**plain_names(), **_metadata_names()}

    def names(module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return known.get((module, name))

    metadata = load(file, names)
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it contains an object of type {type(metadata).__name__}")
    storage_data = metadata.storage_data
    if type(storage_data) is not dict or any(
        type(info) is not _StorageInfo or type(info.relative_path) is not str for info in storage_data.values()
    ):  # other types may return another name when they are read again
        raise pickle.UnpicklingError("its storage_data is not a dictionary with the names of files")
    return metadata


def torch_load(content: str | os.PathLike[str] | IO[bytes]) -> Any:
    """`torch.load` on the CPU with weights_only, whatever torch's version and environment variables define: tensors,
    plain values, and the classes that Megatron-Core permits.

    Raises:
        pickle.UnpicklingError: it contains anything else.
    """
    import torch

    return torch.load(content, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def refusing(file: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the refusal of a pickle in `file` into the error for the user.

    Raises:
        CheckpointError: with the name of the file and of the refused class.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        text = str(error)
        match = re.search(r"GLOBAL ([\w.]+)|Trying to instantiate unsupported class <class '([\w.]+)'>", text)
        if match is None and not isinstance(error, RefusedName):
            reason = re.search(r"WeightsUnpickler error: (.*)", text)
            cause = reason[1].strip() if reason else text.partition("\n")[0]
            raise CheckpointError(f"{file} cannot be read: {cause}; restore it, or load an older checkpoint") from error
        cause = text if match is None else f"it refers to {match[1] or match[2]}"
        raise CheckpointError(
            f"{file} is refused: {cause}, which this format does not contain and which may run code; nothing of it "
            "was executed. Load a checkpoint that training wrote"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Unpickler that permits only some names. A pickle can set attributes of any object it refers to. Therefore
    functions are passed as an object without attributes, and the attributes of classes are compared after the load."""

    def __init__(
        self, file: IO[bytes], names: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(file)
        self._names, self._persistent = names, persistent
        self._before: list[tuple[Any, dict[str, Any]]] = []

    def find_class(self, module: str, name: str) -> Any:
        allowed = self._names(module, name)
        if allowed is None:
            raise RefusedName(f"it refers to {module}.{name}")
        if not isinstance(allowed, type):
            return allowed.__call__ if callable(allowed) else allowed
        if not any(owner is allowed for owner, _ in self._before):
            members = list(allowed) if issubclass(allowed, enum.Enum) else []
            self._before += [(owner, dict(vars(owner))) for owner in (allowed, *members)]
        return allowed

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise RefusedName(f"it refers to {pid!r} outside of itself")
        return self._persistent(pid)

    def undo_changes(self) -> str | None:
        """Restore the attributes of the classes; returns the first class that had changed, or None."""
        changed = None
        for owner, before in self._before:
            now = dict(vars(owner))
            differing = [name for name in now.keys() | before.keys() if now.get(name, now) is not before.get(name, now)]
            kind: Any = type if isinstance(owner, type) else object
            for name in differing:
                if name in before:
                    kind.__setattr__(owner, name, before[name])
                else:
                    kind.__delattr__(owner, name)
            if differing and changed is None:
                changed = str(owner)
        return changed


_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    # Megatron-Core adds the plans of all ranks
    "torch.distributed.checkpoint.planner": (
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),  # torch < 2.3
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
}
_OLDER = {"MCoreMetadata": "Metadata", "MCoreSavePlan": "SavePlan"}
"""Subclasses in checkpoints of Megatron-Core until 0.15, and the classes that hold their fields here."""


def _metadata_names() -> dict[tuple[str, str], Any]:
    allowed = {}
    for module, names in _METADATA.items():
        owner = importlib.import_module(module)
        allowed.update({(module, name): getattr(owner, name) for name in names if hasattr(owner, name)})
    classes = {name: value for (_, name), value in allowed.items()}
    strategies = "megatron.core.dist_checkpointing.strategies.torch"
    return {**allowed, **{(strategies, older): classes[name] for older, name in _OLDER.items()}}
