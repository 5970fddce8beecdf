"""Megatron-Core's reading of checkpoints without pickles that run code.

torch reads `.metadata` with `pickle.load`, and the objects in `.distcp` files with `torch.load(weights_only=False)`
(distributed/checkpoint/filesystem.py, default_planner.py); `common.pt` follows torch's default, which an environment
variable changes. Megatron-Core has no argument for another reader, so its functions are replaced.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.futures import Future

from megatron_wrap.errors import CheckpointError, special_file
from megatron_wrap.inside_folder import leaves_folder
from megatron_wrap.platform.megatron_core import restricted_pickle
from megatron_wrap.platform.megatron_core.replacements import Replacements
from megatron_wrap.platform.megatron_core.versions import unexpected

COMMON = "common.pt"


class PartCheck(Protocol):
    """What a reading asks before it uses a part of a file; offsets and lengths are in bytes."""

    def begin(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """Told before a reading: the parts (file, offset, length) that it will use, in this order."""

    def require(self, name: str, offset: int, length: int) -> None:
        """Called before a part is used.

        Raises:
            CheckpointError: it must not be used.
        """


_check: contextvars.ContextVar[PartCheck | None] = contextvars.ContextVar("check of parts", default=None)


@contextlib.contextmanager
def checked_by(check: PartCheck) -> Iterator[None]:
    """Within the context `RestrictedReader` asks `check`."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


class RestrictedReader(FileSystemReader):
    """Reads a distributed checkpoint, each file of it from its own folder; reads the metadata once.

    Args:
        path: the checkpoint's folder.
    """

    def __init__(self, path: str | os.PathLike[str], *further: Any, **named: Any) -> None:
        super().__init__(path)
        self._metadata: Any = None

    def read_metadata(self, *arguments: Any, **named: Any) -> Any:
        """The metadata.

        Raises:
            CheckpointError: it is damaged, refers to anything but the classes of the format, or names a file outside
                the folder.
        """
        if self._metadata is None:
            self._metadata = read_metadata(Path(self._get_metadata_path(named.get("rank"))))
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Read one file after the other; a part is compared with its hash between its reading and its use.

        Raises:
            CheckpointError: an object in a file refers to a class that checkpoints do not contain, or `checked_by`
                refuses a part.
        """
        files: dict[str, list[Any]] = {}
        restricted: Any = _RestrictedPlanner(planner, self._require)
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        check = _check.get()
        if check is not None:
            infos = [self.storage_data[item.storage_index] for items in files.values() for item in items]
            check.begin([(info.relative_path, info.offset, info.length) for info in infos])
        for name, items in files.items():
            file = Path(self.path) / name
            try:
                with restricted_pickle.refusing(file):
                    super().read_data(dataclasses.replace(plan, items=items), restricted)
            except Exception:
                for item in items:
                    self._require(item)  # a damaged file raises almost any exception
                raise
        finished: Future[None] = Future()
        finished.set_result(None)
        return finished

    def _require(self, item: Any) -> None:
        """Compare the part of an item with its hash, inside `checked_by`."""
        check = _check.get()
        if check is not None:
            info = self.storage_data[item.storage_index]
            check.require(info.relative_path, info.offset, info.length)


def read_metadata(file: Path) -> Any:
    """The content of a checkpoint's `.metadata`; raises as `RestrictedReader.read_metadata`, or OSError."""
    from torch.distributed.checkpoint.metadata import StorageMeta

    with restricted_pickle.refusing(file), file.open("rb") as opened:
        try:
            metadata = restricted_pickle.checkpoint_metadata(opened)
            names = {str(info.relative_path) for info in (metadata.storage_data or {}).values()}
        except (OSError, pickle.UnpicklingError):
            raise
        except Exception as error:  # a damaged pickle raises almost any exception
            raise pickle.UnpicklingError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    for name in sorted(names):
        problem = leaves_folder(file.parent, name)
        if problem is not None:
            raise CheckpointError(f"{file} {problem}; load a checkpoint that training wrote, with its own files")
        if reason := special_file(file.parent / name):
            raise CheckpointError(reason)
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def load_common(folder: str | os.PathLike[str]) -> Any:
    """The content of `common.pt`.

    Raises:
        CheckpointError: it is missing, or contains anything but tensors, plain values and Megatron-Core's classes.
    """
    problem = leaves_folder(folder, COMMON)
    if problem is not None:
        raise CheckpointError(f"{folder} {problem}; load a checkpoint with its own files")
    file = Path(folder) / COMMON
    if reason := special_file(file):
        raise CheckpointError(reason)
    try:
        with restricted_pickle.refusing(file):
            return restricted_pickle.torch_load(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {COMMON} is missing; copy it again") from error


class _RestrictedPlanner:
    """A planner that receives objects as pickles of this process: read with weights_only and written again.

    Args:
        require: is called with each item before what was read for it is used.
    """

    def __init__(self, planner: Any, require: Callable[[Any], None]) -> None:
        self._planner, self._require = planner, require

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def resolve_tensor(self, item: Any) -> Any:
        self._require(item)
        return self._planner.resolve_tensor(item)

    def load_bytes(self, item: Any, value: io.BytesIO) -> None:
        self._require(item)
        written = io.BytesIO()
        torch.save(restricted_pickle.torch_load(value), written)
        written.seek(0)
        self._planner.load_bytes(item, written)


def use_in_megatron(replacements: Replacements) -> None:
    """Make Megatron-Core read checkpoints as described above."""
    strategies = "megatron.core.dist_checkpointing.strategies"
    torch_format, common = (importlib.import_module(f"{strategies}.{name}") for name in ("torch", "common"))
    serialization = importlib.import_module("megatron.core.dist_checkpointing.serialization")
    if not hasattr(torch_format, "_get_filesystem_reader"):
        raise unexpected(f"{torch_format.__name__} has no _get_filesystem_reader")
    for module in (torch_format, serialization):  # 0.19 reads the common state with it as well
        if hasattr(module, "_get_filesystem_reader"):
            replacements.set(module, "_get_filesystem_reader", RestrictedReader)
    replacements.set(torch_format, "FileSystemReader", RestrictedReader)
    strategy = getattr(common, "TorchCommonLoadStrategy", None)
    if strategy is not None:
        replacements.set(strategy, "load_common", lambda _, folder: load_common(folder))
    elif hasattr(serialization, "load_common"):
        replacements.set(serialization, "load_common", load_common)
    else:
        raise unexpected(f"{common.__name__} has no load_common")
