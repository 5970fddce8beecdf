"""Asynchronous saves: other processes write them while the run continues to train, one at a time.

A save of `wrap.save` copies the state of each rank to host memory and returns. Then, without communication between the
ranks: the writer process of each rank writes, flushes and hashes its files, and at last a record of them in the hidden
folder; a thread of global rank 0 waits for all records, and publishes the checkpoint. A failure is announced through
the store of the process group, so that all ranks raise it after the same step.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_wrap.checkpoint.files.hashed_files import FileToWrite
from megatron_wrap.checkpoint.files.run_folder import CheckpointStore, cannot_write
from megatron_wrap.checkpoint.files.writer_process import HostCopy, WriteJob, Writer
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import FILE_FAILURES, describe
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects
from megatron_wrap.utils.dist_logger import logger

_POLL_SECONDS = 0.02
_LOST_SECONDS = 10.0
"""Seconds after which an ending rank no longer waits for other ranks whose files do not change, because those were
killed."""
_KEY = "megatron_wrap/save"
_FAILURES: tuple[type[BaseException], ...] = (*FILE_FAILURES, CheckpointError)


class AsynchronousSaves:
    """The asynchronous saves of a run; the methods are called on every rank.

    Args:
        device: of the state.
        succeeded: called on every rank when it learns that a save is complete.
    """

    def __init__(self, device: torch.device, succeeded: Callable[[], None]) -> None:
        self._succeeded = succeeded
        self.copy = HostCopy(device, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
        self._writer = Writer(self.copy.descriptor)
        self._logged_bytes = 0
        self._save: _Save | None = None
        self._process = os.getpid()
        atexit.register(self.finish_alone)  # a program that ends without `close`

    def start(
        self,
        store: CheckpointStore,
        iteration: int,
        partial: Path,
        files: tuple[FileToWrite, ...],
        finish: Callable[[Sequence[Mapping[str, Any]]], None],
    ) -> None:
        """Begin to write a save whose tensors are in `copy`. No communication.

        Args:
            partial: the hidden folder.
            files: of this rank.
            finish: publishes the checkpoint from the records of all ranks; for global rank 0.
        """
        rank, failure = dist.get_rank(), None
        self._log_size()
        try:
            self._writer.start(WriteJob(partial, _record(rank), files, self.copy.num_bytes))
        except OSError as error:
            failure = describe(error)
        publication = None
        if rank == 0:
            records = [partial / _record(number) for number in range(dist.get_world_size())]
            publication = _Publication(partial, records, finish)
            publication.start()
        self._save = _Save(store, iteration, partial, publication, failure)

    def is_writing(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is being written; on global rank 0."""
        return self._save is not None and self._save.checkpoint == checkpoint

    def after_publication(self, checkpoint: Path, action: Callable[[], None]) -> bool:
        """Call `action` once a checkpoint is published; False if no checkpoint is being written. On global rank 0."""
        save = self._save
        publication = None if save is None or save.checkpoint != checkpoint else save.publication
        return publication is not None and publication.then(action)

    def poll(self, iteration: int) -> None:
        """Check whether the save has ended; to be called after each step. A failure is raised on all ranks after the
        same step.

        A rank takes no step without the others. What global rank 0 writes to the store before a step, all ranks read
        after it.

        Raises:
            CheckpointError: the save failed.
        """
        save = self._save
        if save is None:
            return
        keys = dist.distributed_c10d._get_default_store()
        error, result = f"{_KEY}/{save.partial.name}/error", f"{_KEY}/{save.partial.name}/result"
        failure = self._own_failure(save, timeout=0)
        if failure and not save.reported:
            keys.set(error, failure)
            save.reported = True
        if save.publication is not None and save.result is None:
            if not save.publication.is_alive():
                save.result = save.publication.failure or ""
            elif keys.check([error]):
                save.result = save.publication.abort(keys.get(error).decode())
            if save.result is not None:
                keys.set(result, json.dumps([iteration + 1, save.result]))
                keys.get(result)  # the store has it before this rank takes another step
        if keys.check([result]):
            after, text = json.loads(keys.get(result))
            if iteration >= after:
                self._end(save, text)

    def wait(self) -> None:
        """Wait until no save is under way. Collective.

        Raises:
            CheckpointError: on every rank, if the save failed.
        """
        save = self._save
        failure = None
        if save is not None:
            if save.publication is not None and save.publication.is_alive():
                logger.info_rank_0(f"waiting for the save of iteration {save.iteration}")
            failure = self._own_failure(save, timeout=None)
        failures = [text for text in gather_objects(failure) if text]
        result = None
        if save is not None and save.publication is not None:
            if save.result is not None:  # since a step; writers that then find no folder are not the cause
                result = save.result
            elif failures:
                result = save.publication.abort(failures[0])
            else:
                save.publication.join()
                result = save.publication.failure or ""
        result = broadcast_object(result, source_rank=0)
        if save is not None:
            self._end(save, result or "")

    def finish_alone(self) -> None:
        """Wait as `wait` does, without communication, because this rank may end with an error. A failure is logged."""
        save = self._save
        if save is None or os.getpid() != self._process:
            return
        self._save = None
        failure = save.result or self._own_failure(save, timeout=None) or _wait_while_files_change(save)
        if failure and save.publication is not None:
            failure = save.publication.abort(failure)
        if failure:
            logger.error_all_ranks(_message(save, failure))
        else:
            logger.info_rank_0(_published(save))

    def close(self) -> None:
        """`finish_alone`, then end the writer process and release the memory; a second call does nothing."""
        self.finish_alone()
        atexit.unregister(self.finish_alone)
        self._writer.close()
        self.copy.close()

    @property
    def writer_process(self) -> int | None:
        """Id of this rank's writer process; None: not started."""
        return self._writer.process_id

    def _own_failure(self, save: _Save, timeout: float | None) -> str | None:
        """The reason why this rank's files cannot be written; an empty text once they are written, None while they are
        being written."""
        if save.failure is None:
            save.failure = self._writer.finished(timeout)
        return save.failure

    def _end(self, save: _Save, failure: str) -> None:
        self._save = None
        if failure:
            if self._own_failure(save, timeout=0) is None:  # another rank has failed
                self._writer.close()
            raise CheckpointError(_message(save, failure))
        self._succeeded()
        logger.info_rank_0(_published(save))

    def _log_size(self) -> None:
        if self.copy.num_bytes != self._logged_bytes:
            self._logged_bytes = self.copy.num_bytes
            logger.info_rank_0(
                f"asynchronous saves: {self.copy.num_bytes / 2**20:,.1f} MiB of host memory on each rank for the copy "
                "of its part of the state"
            )


@dataclass
class _Save:
    """A save under way, on one rank."""

    store: CheckpointStore
    iteration: int
    partial: Path
    """The hidden folder."""
    publication: _Publication | None
    """Publication of the checkpoint, on global rank 0; None on other ranks."""
    failure: str | None
    """Failure of this rank's writer; empty once it has finished; None while it writes."""
    reported: bool = False
    """Whether the failure is in the store."""
    result: str | None = None
    """Failure of the save, or an empty text, on global rank 0; None until the save has ended."""

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint once it is published."""
        return self.store.folder_of(self.iteration)

    @property
    def has_ended(self) -> bool:
        """Whether the save has ended, with or without a published checkpoint."""
        if self.publication is not None:
            return not self.publication.is_alive()
        is_tracked = self.store.tracked() == str(self.iteration) or not self.checkpoint.is_dir()
        return is_tracked and not self.partial.is_dir()


class _Publication(threading.Thread):
    """Waits for the records of all ranks, and publishes; on global rank 0.

    Args:
        partial: the hidden folder; removed after a failure.
        records: files of all ranks.
        finish: publishes.
    """

    def __init__(
        self, partial: Path, records: Sequence[Path], finish: Callable[[Sequence[Mapping[str, Any]]], None]
    ) -> None:
        super().__init__(name="publication of a checkpoint", daemon=True)
        self._partial, self._records, self._finish = partial, records, finish
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []
        self._has_ended = False
        self.failure: str | None = None
        """Failure of the publication, or of an action after it; None if there is none."""

    def run(self) -> None:
        while not all(record.is_file() for record in self._records):
            if self._aborted.wait(_POLL_SECONDS):
                return
        try:
            records = [json.loads(record.read_text(encoding="utf-8")) for record in self._records]
            for record in self._records:
                record.unlink()
            self._finish(records)
        except _FAILURES as failure:
            self._fail(describe(failure))
        except BaseException as bug:
            self._fail(repr(bug))
        with self._lock:
            self._has_ended = True
            try:
                for action in self._actions if self.failure is None else ():
                    action()
            except OSError as failure:
                self.failure = describe(failure)

    def then(self, action: Callable[[], None]) -> bool:
        """Call `action` after the publication; False if the publication has already ended."""
        with self._lock:
            if not self._has_ended:
                self._actions.append(action)
            return not self._has_ended

    def abort(self, failure: str) -> str:
        """End without a checkpoint, unless it is published already; returns the failure."""
        self._aborted.set()
        self.join()
        self._fail(failure)
        return failure

    def _fail(self, failure: str) -> None:
        self.failure = failure
        shutil.rmtree(self._partial, ignore_errors=True)


def _wait_while_files_change(save: _Save) -> str | None:
    """Wait for the end of a save without communication; returns the failure, also if ranks no longer write.

    All ranks wait: when one has ended, torchrun ends the others.
    """
    last, since = None, time.monotonic()
    while not save.has_ended:
        time.sleep(_POLL_SECONDS)
        if (now := _activity(save.partial)) != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > _LOST_SECONDS:
            return f"other ranks wrote nothing for {_LOST_SECONDS:.0f} s"
    return None if save.publication is None else save.publication.failure


def _record(rank: int) -> str:
    return f"rank_{rank}.written"


def _activity(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of each file."""
    with contextlib.suppress(OSError):
        files = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
        return sorted((name, status.st_size, status.st_mtime_ns) for name, status in files)
    return []


def _message(save: _Save, failure: str) -> str:
    return f"asynchronous save of iteration {save.iteration}: {cannot_write(save.store.folder, failure)}"


def _published(save: _Save) -> str:
    return f"checkpoint of iteration {save.iteration}: {save.checkpoint}"
