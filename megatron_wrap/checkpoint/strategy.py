"""Writes and reads Megatron-Core's distributed format; a failure on one rank raises on all ranks.

Megatron-Core's save reports failures of its writers to all ranks. But if only global rank 0 fails (writing the common
state or the metadata), the other ranks wait in the next collective; here rank 0 takes part in it before it raises.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_wrap.checkpoint.content import CONTENT_METADATA
from megatron_wrap.checkpoint.factories import merged_in_place
from megatron_wrap.checkpoint.files.complete_checkpoints import free_bytes
from megatron_wrap.checkpoint.files.host_copy import HostCopy
from megatron_wrap.checkpoint.files.write_tensor_files import FileToWrite, Index, write_files
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import FILE_FAILURES, agree, agreed, describe, on_rank_0
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.platform.megatron_core import repairs, versions

_BYTES_AROUND_A_TENSOR = 1024
"""Estimated overhead of a tensor in bytes: from `torch.save`, and in the metadata."""
FAILURES = (*FILE_FAILURES, CheckpointException, CheckpointingException)
"""Exceptions of a failed write or a damaged file. torch's CheckpointException is not a subclass of Exception."""


def write(sharded_state: dict[str, Any], folder: Path, group: Any) -> dict[str, Any]:
    """Write into an empty folder as `dist_checkpointing.save` does; the ranks of `group` share the writing. Collective
    over all ranks.

    The files are written by threads of each rank. Megatron-Core's own writer forks processes for them, and a rank waits
    forever if one of these is killed.

    Returns:
        Name -> hashes of all ranks' tensor files, as of `hash_files`.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    base, strategy, buckets = _planned(sharded_state, folder, group)
    record: dict[str, Any] = {}
    with _agreed_save(strategy, folder):
        record = write_files(folder, _files(buckets, lambda tensor: tensor), lambda tensor: tensor.detach().cpu())
        buckets.clear()
    records = gather_objects(record)
    on_rank_0(lambda: _finish(base, folder, records), cannot_write(folder.parent, "{}"), FAILURES)
    return {name: entry for part in records for name, entry in part["hashes"].items()}


@dataclass(frozen=True)
class PlannedSave:
    """A save whose tensors were copied, and whose files another process writes."""

    files: tuple[FileToWrite, ...]
    """Files of this rank."""
    finish: Callable[[Sequence[Mapping[str, Any]]], None]
    """Function for global rank 0 that writes the metadata from the records of all ranks' `WriteJob`, without
    communication."""


def plan(sharded_state: dict[str, Any], folder: Path, group: Any, copy: HostCopy) -> PlannedSave:
    """Plan a save as `write` does, but copy the tensors to `copy` instead of writing them; they may change afterwards.
    Collective over all ranks.

    Raises:
        CheckpointError: on every rank, if any rank has too little memory or could not write the common state.
    """
    base, strategy, buckets = _planned(sharded_state, folder, group)
    with _agreed_save(strategy, folder):
        copies = iter(copy.take([tensor for _, _, (_, tensors) in buckets for _, tensor in tensors]))
        files = _files(buckets, lambda _: next(copies))
        buckets.clear()  # the writer, which writes the metadata later, would keep the tensors
    return PlannedSave(files, lambda records: _finish(base, folder, records))


def _planned(sharded_state: dict[str, Any], folder: Path, group: Any) -> tuple[_PlanningSave, _SharedSave, list[Any]]:
    """Write the common state. Returns the plan, and Megatron-Core's buckets of this rank, (path, name, (objects,
    tensors)), which fit into the folder."""
    base = _PlanningSave("torch_dist", 1)
    strategy = _SharedSave(base, group)
    buckets: list[Any] = []
    with _agreed_save(strategy, folder):
        arguments = versions.save_arguments(async_save=True)
        metadata = dict(CONTENT_METADATA)
        with repairs.without_writers():
            dist_checkpointing.save(sharded_state, str(folder), strategy, content_metadata=metadata, **arguments)
        buckets += base.writer.write_buckets or []
    _check_space(folder, buckets)
    return base, strategy, buckets


def _check_space(folder: Path, buckets: Sequence[Any]) -> None:
    """Compare the size of all ranks' files with the free space of the folder. Collective over all ranks.

    Raises:
        CheckpointError: on every rank, if there is too little.
    """
    needed = sum(gather_objects(_num_bytes(buckets)))

    def compare() -> None:
        free = free_bytes(folder)
        if free is not None and needed > free:
            sizes = f"it needs {needed / 2**30:,.3g} GiB, and {free / 2**30:,.3g} GiB are free there"
            advice = "delete files, lower megatron_wrap.checkpoint.keep, or choose another folder"
            raise CheckpointError(cannot_write(folder.parent, f"{sizes}: {advice}"))

    on_rank_0(compare)


def _num_bytes(buckets: Sequence[Any]) -> int:
    """Size of this rank's files in bytes."""
    total = 0
    for _, _, (objects, tensors) in buckets:
        total += sum(data.getbuffer().nbytes for _, data in objects)
        total += sum(tensor.numel() * tensor.itemsize + _BYTES_AROUND_A_TENSOR for _, tensor in tensors)
    return total


def _finish(base: _PlanningSave, folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the metadata, on global rank 0, without communication."""
    base.writer.finish(base.metadata, [[_write_result(part) for part in record["parts"]] for record in records])
    save_config(CheckpointingConfig(base.backend, base.version), str(folder))


def read_record(file: Path) -> dict[str, Any]:
    """The record of a `WriteJob`."""
    return dict(json.loads(file.read_text(encoding="utf-8")))


class _PlanningSave(TorchDistSaveShardedStrategy):
    """Keeps the plan of an asynchronous save: `writer`, which has the items of this rank, and on global rank 0
    `metadata`."""

    writer: Any
    metadata: Any

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *further: Any) -> Any:
        self.writer, self.metadata = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned, *further)


def _files(buckets: Sequence[Any], content_of: Callable[[torch.Tensor], Any]) -> tuple[FileToWrite, ...]:
    """The files of Megatron-Core's buckets; `content_of` is called for each tensor, in their order."""
    files = []
    for _, name, (objects, tensors) in buckets:
        parts: list[tuple[Index, Any]] = [(_index(item), data.getvalue()) for item, data in objects]
        parts += [(_index(item), content_of(tensor)) for item, tensor in tensors]
        files.append(FileToWrite(name, tuple(parts)))
    return tuple(files)


def _index(item: WriteItem) -> Index:
    index = item.index
    return index.fqn, None if index.offset is None else tuple(index.offset), index.index


def _write_result(part: Mapping[str, Any]) -> WriteResult:
    name, offset, number = part["index"]
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return WriteResult(index, part["length"], _StorageInfo(part["file"], part["offset"], part["length"]))


@contextlib.contextmanager
def _agreed_save(strategy: _SharedSave, folder: Path) -> Iterator[None]:
    """Raise a CheckpointError on all ranks if the body, `dist_checkpointing.save` and what follows, fails on one."""
    error: str | None = None
    cause: BaseException | None = None
    try:
        yield
    except (*FAILURES, CheckpointError) as failure:
        error, cause = describe(failure), failure
        if error and not isinstance(failure, OSError | CheckpointError):
            # torch's and Megatron-Core's writers do not pass on the operating system's message
            error = f"not all data could be written; is the disk or the quota full? ({error})"
        if not strategy.entered:  # the other ranks wait in its first collective
            with contextlib.suppress(CheckpointError):
                agree(error)
    errors = [text for text in gather_objects(error) if text is not None]
    if errors:  # the text is empty on ranks that failed only because another did
        raise CheckpointError(cannot_write(folder.parent, next(filter(None, errors), "a rank failed"))) from cause


def cannot_write(folder: Path, cause: str) -> str:
    """The message for a failed save."""
    return f"no checkpoint could be written to {folder}: {cause}; earlier checkpoints there are unchanged"


def read(sharded_state: dict[str, Any], folder: Path, group: Any) -> dict[str, Any]:
    """Read as `dist_checkpointing.load` does; the ranks of `group` share the reading. Collective over all ranks.

    Returns:
        The state with tensors instead of their descriptions; the model's tensors are overwritten in place.

    Raises:
        CheckpointError: on every rank, if any rank could not read.
    """
    # only validates the format; the strategy below is the same class in both Megatron-Core versions
    get_default_load_sharded_strategy(str(folder))
    strategy: Any = _AgreedRead(f"checkpoint {folder} cannot be read: {{}}; restore it, or load an older one")
    if group.size() > 1:
        strategy = _SharedRead(strategy, group)
    return dist_checkpointing.load(merged_in_place(sharded_state), str(folder), strategy)


class _SharedSave(FullyParallelSaveStrategyWrapper):
    """Replicas share the writing; all ranks check for failures before the first collective of the planning."""

    def __init__(self, strategy: Any, group: Any) -> None:
        super().__init__(strategy, group)
        self.entered = False

    def async_save(self, *arguments: Any, **named: Any) -> Any:
        self.entered = True
        agree(None)
        return super().async_save(*arguments, **named)


class _SharedRead(FullyParallelLoadStrategyWrapper):
    """Replicas share the reading, and send each other what they read.

    Tensors that are sent must be contiguous: gloo writes to the storage of a view without its strides, and NCCL refuses
    it. The halves of experts' fused weights are such views; they are read into tensors of their own.
    """

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *arguments: Any, **named: Any) -> Any:
        for tensor in nested_values(sharded_state_dict):
            if isinstance(tensor, ShardedTensor) and tensor.data is not None and not tensor.data.is_contiguous():
                tensor.data = torch.empty(tensor.data.shape, dtype=tensor.data.dtype, device=tensor.data.device)
        return super().load(sharded_state_dict, checkpoint_dir, *arguments, **named)


class _AgreedRead(TorchDistLoadShardedStrategy):
    """Raises on all ranks if one cannot read its part.

    Args:
        message: of the CheckpointError; {} is replaced by the cause.
    """

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def load(self, *arguments: Any, **named: Any) -> Any:
        result = None
        with agreed(self._message, FAILURES):
            try:
                result = super().load(*arguments, **named)
            except CheckpointException as failure:
                refusals = [cause for cause, _ in failure.failures.values() if isinstance(cause, CheckpointError)]
                if refusals:
                    raise refusals[0] from failure
                raise
        return result
