"""Megatron-Core's reading of checkpoints without pickles that run code.

torch reads `.metadata` with `pickle.load`, and the objects in `.distcp` files with `torch.load(weights_only=False)`
(distributed/checkpoint/filesystem.py, default_planner.py); `common.pt` follows torch's default, which an environment
variable changes. Megatron-Core has no argument for another reader, so its functions are replaced.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from megatron_wrap.errors import CheckpointError, special_file
from megatron_wrap.inside_folder import leaves_folder
from megatron_wrap.platform.megatron_core import restricted_pickle
from megatron_wrap.platform.megatron_core.torch_save_format import (
    BytesInMemory,
    ElementsInMemory,
    elements_of,
    read_into,
)
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements
from megatron_wrap.platform.megatron_core.versions import unexpected

COMMON = "common.pt"


FilePart = tuple[str, int, int]
"""(name of a file, offset in bytes, length in bytes) of a part."""


ReadPart = Callable[[FilePart, BytesInMemory | None], Any]
"""Function that reads a part from memory, or, without memory, from its file."""


class PartReading(Protocol):
    """Decides when, in which thread, and from which memory parts of files are read."""

    def ahead(self, parts: Sequence[FilePart], read: ReadPart) -> Iterator[tuple[FilePart, Any]]:
        """Each part, in this order, and the result of `read` for it; `read` may be called from other threads.

        The memory is reused for other parts once the next part is requested.

        Raises:
            CheckpointError: a part must not be used; it is not read then.
        """


_reading: contextvars.ContextVar[PartReading | None] = contextvars.ContextVar("reading of parts", default=None)


@contextlib.contextmanager
def read_by(reading: PartReading) -> Iterator[None]:
    """Make `RestrictedReader` read the parts of tensor files through `reading` in the block."""
    token = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(token)


class RestrictedReader(FileSystemReader):
    """Reader of a distributed checkpoint whose files are all in its own folder; reads the metadata once.

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
        """Read the parts of files in the order of their positions, each once, through `read_by`. If a part is requested
        by a single contiguous tensor, it is read directly into it, or copied to it if it is on a GPU.

        Raises:
            CheckpointError: an object in a file refers to a class that checkpoints do not contain, or `read_by` refuses
                a part.
        """
        reading = _reading.get()
        items: dict[FilePart, list[Any]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            items.setdefault((info.relative_path, info.offset, info.length), []).append(item)

        parts = sorted(items)
        targets = {part: _whole_target(planner, items[part]) for part in parts}

        def read(part: FilePart, memory: BytesInMemory | None) -> Any:
            return self._read_part(items[part][0], targets[part], memory)

        contents = ((part, read(part, None)) for part in parts) if reading is None else reading.ahead(parts, read)
        for part, content in contents:
            self._pass_on(planner, items[part], targets[part], content)
        finished: Future[None] = Future()
        finished.set_result(None)
        return finished

    def _read_part(self, item: Any, target: torch.Tensor | None, memory: BytesInMemory | None) -> Any:
        """The saved value of an item: `target`, if it is on the CPU and could be read into; the elements in `memory`,
        if they can be copied to `target`; else a new tensor on the CPU. An object is returned as the bytes of a pickle
        of this process, read with weights_only and written again."""
        info = self.storage_data[item.storage_index]
        file = Path(self.path) / info.relative_path
        with restricted_pickle.refusing(file), contextlib.ExitStack() as stack:
            saved: Any = memory
            if saved is None:
                saved = self._slice_file(stack.enter_context(file.open("rb")), info)
            if target is not None and _is_on_cpu(target):
                if read_into(target, saved):
                    return target
            elif target is not None and memory is not None and (elements := elements_of(target, memory)) is not None:
                return elements
            saved.seek(0)
            content = restricted_pickle.torch_load(saved)
        if item.type != LoadItemType.BYTE_IO:
            return content
        written = io.BytesIO()
        torch.save(content, written)
        return written.getvalue()

    def _pass_on(self, planner: Any, items: Sequence[Any], target: torch.Tensor | None, content: Any) -> None:
        """Pass the result of `_read_part` for a part of a file to the items of the part."""
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(content))
            elif isinstance(content, ElementsInMemory) and target is not None:
                content.copy_to(target)
                planner.commit_tensor(item, target)
            elif content is target:
                planner.commit_tensor(item, content)
            else:
                _take(planner, item, content)


def _is_on_cpu(target: torch.Tensor) -> bool:
    return target.device.type == "cpu"


def _whole_target(planner: Any, items: Sequence[Any]) -> torch.Tensor | None:
    """The memory for the tensor that the only item of a part requests, if it is contiguous."""
    item, *others = items
    if others or item.type == LoadItemType.BYTE_IO:
        return None
    if type(planner.lookup_tensor(item.dest_index).detach()) is not torch.Tensor:
        return None  # Megatron-Core allocates memory for a quantized one when it is resolved
    target = planner.resolve_tensor(item).detach()
    return target if type(target) is torch.Tensor and target.is_contiguous() and target.numel() > 0 else None


def _take(planner: Any, item: Any, tensor: Any) -> None:
    """Copy the part of a saved tensor that an item requests, as torch's FileSystemReader does."""
    tensor = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        raise CheckpointError(
            f"{item.storage_index.fqn} has shape {list(tensor.size())} in the checkpoint and {list(target.size())} in "
            "its metadata; load an older checkpoint"
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def read_metadata(file: Path) -> Any:
    """The content of a checkpoint's `.metadata`; raises the errors of `RestrictedReader.read_metadata`, or OSError."""
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
