"""Saving of a run's state in Megatron-Core's distributed format: `save_checkpoint` is collective over all ranks, and a
failure on one rank raises on all ranks.

Megatron-Core's save reports failures of its writers to all ranks. But if only global rank 0 fails (writing the common
state or the metadata), the other ranks wait in the next collective; here rank 0 takes part in it before it raises. The
files are written by threads of each rank, or with `async_save` by another process. Megatron-Core's own writer forks
processes for them, and a rank waits forever if one of these is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_wrap.bridge.adapters.peft_folder import other_adapters
from megatron_wrap.bridge.export.model_card import training_record
from megatron_wrap.checkpoint import saved_tensors
from megatron_wrap.checkpoint.asynchronous_saves import AsynchronousSaves
from megatron_wrap.checkpoint.files.hashed_files import FileToWrite, Index, write_files
from megatron_wrap.checkpoint.files.run_folder import RESOLVED, CheckpointStore, cannot_write, free_bytes
from megatron_wrap.checkpoint.files.writer_process import HostCopy
from megatron_wrap.checkpoint.saved_adapter import base_record
from megatron_wrap.checkpoint.saved_tensors import CONTENT_METADATA
from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.derived import saves_adapter_alone
from megatron_wrap.engine.passes.parameters import synchronize_parameters
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import FILE_FAILURES, agree, describe, on_rank_0
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.platform.megatron_core import repairs, versions

_BYTES_AROUND_A_TENSOR = 1024
"""Estimated overhead of a tensor in bytes: from `torch.save`, and in the metadata."""

FAILURES = (*FILE_FAILURES, CheckpointException, CheckpointingException)
"""Exceptions of a failed write or a damaged file. torch's CheckpointException is not a subclass of Exception."""


@dataclass(frozen=True)
class RunRecord:
    """What every checkpoint of a run records about the run; computed once, when the run is set up."""

    resolved: str
    """Content of `resolved.yaml`: the run's configuration without secrets."""
    manifest: Mapping[str, Any]
    """JSON values for the manifest: versions, layout, vocabulary size, the training record, and of an adapter its base
    and the frozen adapters besides it."""
    adapter_alone: bool
    """Whether checkpoints contain the adapter without the weights of its base."""


def run_record(config: RunConfig, layout: Mapping[str, Any], vocab_size: int) -> RunRecord:
    """The record of a run; reads the configuration and the files of an adapter's base.

    Args:
        layout: from `layout_record`.
        vocab_size: of the model, without padding.

    Raises:
        ConfigError: the base of an adapter cannot be found. OSError: its files cannot be read.
    """
    adapter_alone = saves_adapter_alone(config)
    manifest = {
        "megatron_core": versions.version(),
        "torch": torch.__version__,
        "vocab_size": vocab_size,
        "layout": layout,
        "training": training_record(config),
    }
    if adapter_alone:
        manifest["base"] = base_record(config)
    if others := other_adapters(config):
        manifest["other_adapters"] = others
    return RunRecord(config.record, manifest, adapter_alone)


def save_checkpoint(
    state: TrainingState,
    folder: str | os.PathLike[str],
    record: RunRecord,
    keep: int | None = None,
    asynchronous: AsynchronousSaves | None = None,
    follow_up: Callable[[], None] | None = None,
) -> Path:
    """Save everything that a resumed run needs as the checkpoint of the current iteration. Collective.

    The checkpoint becomes visible only when it is complete; an earlier one of the same iteration stays valid until
    then.

    Args:
        folder: the run's checkpoint folder, on a file system that all ranks share.
        record: from `run_record`; used on global rank 0.
        keep: number of checkpoints to keep, older ones but the best are removed; None keeps all.
        asynchronous: other processes write the checkpoint, and this function returns when the state is copied; None: it
            returns when the checkpoint is complete.
        follow_up: called on global rank 0 once the checkpoint is complete, without communication.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on every rank, if any rank could not write; earlier checkpoints are unchanged.
    """
    iteration, best = state.progress.iteration, state.best.iteration
    store = CheckpointStore(folder)

    def prune() -> None:
        store.prune(keep, best)
        if follow_up is not None:
            follow_up()

    publish(state, store, iteration, lambda: _full_state(state, record.adapter_alone), record, prune, asynchronous)
    return store.folder_of(iteration)


def publish(
    state: TrainingState,
    store: CheckpointStore,
    iteration: int,
    sharded_state: Callable[[], dict[str, Any]],
    record: RunRecord,
    prune: Callable[[], None] = lambda: None,
    asynchronous: AsynchronousSaves | None = None,
) -> None:
    """Write a checkpoint into a hidden folder and rename the folder once it is complete. Collective.

    Args:
        sharded_state: returns Megatron-Core's sharded state to write; called once all ranks see the folder.
        prune: called on global rank 0 once the checkpoint is visible, without communication.
        asynchronous: copies the tensors; the files are written and the folder is renamed after the return.

    Raises:
        CheckpointError: on every rank, if any rank could not write; no new checkpoint is visible then.
    """
    message = cannot_write(store.folder, "{}")
    manifest = {**record.manifest, "consumed_samples": state.progress.consumed_samples}
    with _hidden_folder(state.parallel.world.rank, store, iteration, message) as partial:
        planned = _planned(sharded_state(), partial, state.parallel.dp_cp.group)

        def commit(written: Sequence[Mapping[str, Any]]) -> None:
            """Complete the checkpoint on global rank 0, from what `write_files` returned on all ranks."""
            planned.write_metadata(written)
            versions.common_state_file(partial)
            (partial / RESOLVED).write_text(record.resolved, encoding="utf-8")
            hashes = {name: entry for part in written for name, entry in part["hashes"].items()}
            store.commit(partial, iteration, manifest, hashes)

        def commit_and_prune(written: Sequence[Mapping[str, Any]]) -> None:
            commit(written)
            prune()

        if asynchronous is not None:
            asynchronous.start(store, iteration, partial, planned.copied(asynchronous.copy), commit_and_prune)
            return
        written = planned.write()
        on_rank_0(lambda: commit(written), message, FAILURES)
        on_rank_0(prune, f"{store.folder}: older checkpoints cannot be removed: {{}}")


@contextlib.contextmanager
def _hidden_folder(rank: int, store: CheckpointStore, iteration: int, message: str) -> Iterator[Path]:
    """Context with a hidden folder that all ranks see; the folder is removed if the block fails. Collective."""
    partial = Path(on_rank_0(lambda: str(store.begin(iteration)), message))
    try:
        unseen = f"rank {rank} does not see {partial}, which rank 0 created"
        agree(None if partial.is_dir() else f"{unseen}; set megatron_lm.train.common.save to a shared file system")
        yield partial
    except BaseException:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _full_state(state: TrainingState, adapter_alone: bool) -> dict[str, Any]:
    synchronize_parameters(state.chunks, bool(state.config.ddp.overlap_param_gather))
    train = state.config.train
    models = saved_tensors.model_entries(state.chunks, state.parallel, base=not adapter_alone)
    sharded_state: dict[str, Any] = {**saved_tensors.common_entries(state.progress, state.best), **models}
    if not train.no_save_optim:
        sharded_state["optimizer"] = saved_tensors.optimizer_entry(
            state.optimizer, state.chunks, models, state.parallel, state.config, is_loading=False
        )
        sharded_state["opt_param_scheduler"] = state.lr_scheduler.state_dict()
    if not train.no_save_rng:
        sharded_state["rng_state"] = saved_tensors.rng_entry(state.parallel, state.platform.device, is_loading=False)
    return saved_tensors.without_fp8(sharded_state)


@dataclass(frozen=True)
class _PlannedSave:
    """A save whose common state is written, and whose tensors are planned."""

    folder: Path
    planning: _PlanningSave
    strategy: _SharedSave
    buckets: list[Any]
    """Megatron-Core's buckets of this rank: (path, name, (objects, tensors))."""

    def write(self) -> list[dict[str, Any]]:
        """Write the files; returns what `write_files` returned on each rank. Collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write.
        """
        written: dict[str, Any] = {}
        with _agreed_save(self.strategy, self.folder):
            files = _files(self.buckets, lambda tensor: tensor)
            written = write_files(self.folder, files, lambda tensor: tensor.detach().cpu())
            self.buckets.clear()
        return gather_objects(written)

    def copied(self, copy: HostCopy) -> tuple[FileToWrite, ...]:
        """The files of this rank, with copies of the tensors in `copy`; the tensors may change afterwards. Collective.

        Raises:
            CheckpointError: on every rank, if any rank has too little memory.
        """
        files: tuple[FileToWrite, ...] = ()
        with _agreed_save(self.strategy, self.folder):
            copies = iter(copy.take([tensor for _, _, (_, tensors) in self.buckets for _, tensor in tensors]))
            files = _files(self.buckets, lambda _: next(copies))
            self.buckets.clear()  # the thread that writes the metadata later would keep the tensors
        return files

    def write_metadata(self, written: Sequence[Mapping[str, Any]]) -> None:
        """Write the metadata on global rank 0, without communication.

        Args:
            written: what `write_files` returned on each rank.
        """
        planning = self.planning
        results = [[_write_result(part) for part in of_rank["parts"]] for of_rank in written]
        planning.writer.finish(planning.metadata, results)
        save_config(CheckpointingConfig(planning.backend, planning.version), str(self.folder))


def _planned(sharded_state: dict[str, Any], folder: Path, group: Any) -> _PlannedSave:
    """Write the common state into an empty folder, and plan the tensor files, which fit into it; the ranks of `group`
    share the writing. Collective.

    Raises:
        CheckpointError: on every rank, if any rank could not write, or there is too little space.
    """
    planning = _PlanningSave("torch_dist", 1)
    strategy = _SharedSave(planning, group)
    buckets: list[Any] = []
    with _agreed_save(strategy, folder):
        arguments = versions.save_arguments(async_save=True)
        metadata = dict(CONTENT_METADATA)
        with repairs.without_writers():
            dist_checkpointing.save(sharded_state, str(folder), strategy, content_metadata=metadata, **arguments)
        buckets += planning.writer.write_buckets or []
    _check_space(folder, buckets)
    return _PlannedSave(folder, planning, strategy, buckets)


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


class _PlanningSave(TorchDistSaveShardedStrategy):
    """Keeps the plan of an asynchronous save: `writer`, which has the items of this rank, and on global rank 0
    `metadata`."""

    writer: Any
    metadata: Any

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *further: Any) -> Any:
        self.writer, self.metadata = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned, *further)


class _SharedSave(FullyParallelSaveStrategyWrapper):
    """Replicas share the writing; all ranks check for failures before the first collective of the planning."""

    def __init__(self, strategy: Any, group: Any) -> None:
        super().__init__(strategy, group)
        self.entered = False

    def async_save(self, *arguments: Any, **named: Any) -> Any:
        self.entered = True
        agree(None)
        return super().async_save(*arguments, **named)


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
