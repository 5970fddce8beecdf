"""Selects the checkpoint that a run resumes or starts from, and keeps track of the saved state."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megatron_wrap.checkpoint.asynchronous_saves import AsynchronousSaves
from megatron_wrap.checkpoint.files.downloads import fetch_newest
from megatron_wrap.checkpoint.files.run_folder import BEST, TRACKER, CheckpointStore, cannot_write, missing_part
from megatron_wrap.checkpoint.files.uploads import Uploads
from megatron_wrap.checkpoint.load import DamagedCheckpoint, load_checkpoint
from megatron_wrap.checkpoint.reference_checkpoints import (
    is_saved,
    load_first_weights,
    load_reference,
    prune_references,
    save_reference,
    saved_iteration,
)
from megatron_wrap.checkpoint.save import FAILURES, RunRecord, run_record, save_checkpoint
from megatron_wrap.checkpoint.saved_run import refuse_resume, starting_checkpoint
from megatron_wrap.checkpoint.saved_tensors import layout_record
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.engine.passes.parameters import synchronize_parameters
from megatron_wrap.engine.state.state import BestEvaluation, TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.metrics.phases import SAVE, doing
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.utils.dist_logger import logger

_MAX_FAILED_SAVES = 3
"""Number of failed saves in a row after which a run with `on_save_error: continue` ends."""


class RunCheckpoints:
    """The checkpoints of one run. All methods but `ended` and `close` are collective over all ranks, the
    constructor as well.

    Args:
        state: of the run, with its model built.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._saved: tuple[Path, int] | None = None
        """Folder and iteration of the checkpoint that contains the current state."""
        self.loaded: tuple[Path, int] | None = None
        """Folder and iteration of the checkpoint that was loaded last."""
        self._loaded_all = False
        """Whether the last load loaded all parts that it requested."""
        self._reference_saved: tuple[str, int] | None = None
        """Checkpoint folder that contains this reference model, and its iteration there."""
        self._asynchronous: AsynchronousSaves | None = None
        """Saves by other processes; None without `async_save`, and before the first save."""
        self._failed_saves = 0
        """Number of saves in a row that have failed."""
        self._record: RunRecord | None = None
        """What each checkpoint records about the run; None without `save`."""
        if state.config.train.save is not None:
            layout, vocab_size = layout_record(state.parallel, state.platform.name), state.shape.vocab_size
            message = cannot_write(Path(state.config.train.save), "{}")
            self._record = on_rank_0(lambda: run_record(state.config, layout, vocab_size), message, FAILURES)
        self._uploads: Uploads | None = None
        """Uploads of checkpoints, on global rank 0 of a run with a remote `save`; None before the restore or the first
        save, and on other ranks."""

    def restore(self, weights_only: bool = False) -> int | None:
        """Resume from the newest checkpoint in `save`, else start from `load`, if it is set.

        Args:
            weights_only: load only the weights.

        Returns:
            The iteration from which the run resumes; None for a new run.

        Raises:
            CheckpointError: see `load`; or there is a checkpoint to resume and `resume` is never; or it lacks the
                reference model.
        """
        state, train = self._state, self._state.config.train
        resumed_from, with_reference = None, False
        start = starting_checkpoint(state.config)
        if not weights_only:
            self._start_uploads()
        if start is not None and start.resumes:
            refuse_resume(state.config)
            with_reference = self._load_newest(CheckpointStore(str(train.save)), weights_only)
            resumed_from = state.progress.iteration
            if self._loaded_all and not weights_only:
                self._saved = self.loaded
            logger.info_rank_0(f"resuming from iteration {resumed_from} of {train.save}")
            last = derived.train_iters(state.config)
            if resumed_from >= last and not weights_only:
                logger.info_rank_0(
                    f"the run is finished: nothing is left to train after iteration {last}; to continue, raise "
                    f"{_length_key(state.config)}"
                )
        elif train.load is not None:
            with_reference = self.load(train.load, weights_only=train.finetune or weights_only)
            state.best = BestEvaluation()  # its checkpoint is in another folder
        if state.reference is not None and not with_reference:
            self._start_reference(resumed_from)
        return resumed_from

    def roll_back(self) -> None:
        """Load the newest checkpoint in `save`, as a run that resumes from it; waits for an asynchronous save.

        Raises:
            CheckpointError: there is none.
        """
        self.wait()
        store = CheckpointStore(self._folder())
        if on_rank_0(store.latest) is None:
            raise CheckpointError(f"the run cannot be rolled back: there is no checkpoint in {store.folder} yet")
        self._load_newest(store, weights_only=False)

    def _load_newest(self, store: CheckpointStore, weights_only: bool) -> bool:
        """`load` of the newest undamaged checkpoint; damaged newer ones are renamed."""
        if not weights_only:
            on_rank_0(lambda: self._set_all_aside(store, store.passed_over()))
            on_rank_0(lambda: _warn_of_newer(store))
        while True:
            try:
                return self.load(store.folder, weights_only)
            except DamagedCheckpoint as error:
                path, reason = error.path, error.reason
                if path.parent != store.folder:
                    raise  # a reference model
            damaged = {path: reason}
            on_rank_0(partial(self._set_all_aside, store, damaged))

    def _set_all_aside(self, store: CheckpointStore, damaged: Mapping[Path, str]) -> None:
        for path, reason in damaged.items():
            self._set_aside(store, path, reason)

    def _set_aside(self, store: CheckpointStore, path: Path, reason: str) -> None:
        """Rename a damaged checkpoint; on rank 0."""
        if self._state.config.checkpoint.resume == "strict":
            raise CheckpointError(
                f"checkpoint {path} is damaged: {reason}; megatron_wrap.checkpoint.resume is strict: restore it, or "
                "set resume: auto to continue from the one before it"
            )
        config = self._state.config
        target = store.set_aside(path)
        if target is None and config.remote_save is not None and store.folder == Path(config.train.save or ""):
            iteration = int(path.name.removeprefix("iter_"))
            fetch_newest(config.remote_save, store.folder, strict=False, below=iteration)
            target = store.set_aside(path)
        if target is None:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {reason}; there is no older one in {store.folder}: restore it, or "
                "choose another folder"
            )
        logger.warning_rank_0(
            f"checkpoint {path} is damaged: {reason}; it is now {target.name}, and the run resumes from the "
            "one before it"
        )

    def _start_reference(self, resumed_from: int | None) -> None:
        """Load or copy the first weights of the reference model."""
        state = self._state
        reference = state.reference
        assert reference is not None
        if resumed_from is not None and is_saved(reference):
            changes = reference.settings.update_interval is not None
            raise CheckpointError(
                f"{state.config.train.save} contains no reference model{f' of iteration {resumed_from}' * changes}, "
                f"because it was saved without megatron_wrap.models.reference{' that follows the policy' * changes}; "
                "set that key to null, or start from these weights in a new save folder with train.common.load and "
                "finetune: true"
            )
        if reference.settings.checkpoint is not None:
            load_first_weights(state, reference.settings.checkpoint)
        elif reference.settings.source == "copy":
            synchronize_parameters(state.chunks, bool(state.config.ddp.overlap_param_gather))
            reference.copy_policy(state.chunks)

    def load(self, folder: str | os.PathLike[str] | None, weights_only: bool) -> bool:
        """Load a checkpoint, and the reference model saved with it.

        Args:
            folder: a checkpoint folder (the newest checkpoint is loaded) or one checkpoint; None: `save`, else `load`
                of the configuration.
            weights_only: do not load iteration, optimizer, schedule, random generators and reference model.

        Returns:
            Whether a reference model was loaded.

        Raises:
            CheckpointError: the checkpoint is missing, in an unsupported format, or from another model.
        """
        state, train = self._state, self._state.config.train
        folder = folder or train.save or train.load
        if folder is None:
            raise CheckpointError("wrap.load: there is no folder; pass one, or set megatron_lm.train.common.load")
        self.wait()
        self._saved = None
        report = load_checkpoint(
            state,
            folder,
            weights_only=weights_only,
            with_optimizer=not train.no_load_optim,
            with_rng=not train.no_load_rng,
        )
        self.loaded, self._loaded_all = (report.path, report.iteration), not report.skipped
        reference = state.reference
        with_reference = False
        if reference is not None and is_saved(reference) and not weights_only:
            with_reference = load_reference(state, folder)
        if with_reference and reference is not None:
            self._reference_saved = str(folder), saved_iteration(reference, state.progress)
        parts = [*report.loaded, *(["reference model"] if with_reference else [])]
        skipped = f" (not loaded: {', '.join(report.skipped)})" if report.skipped else ""
        layout = ", saved on another layout" if report.other_layout and not report.skipped else ""
        logger.info_rank_0(f"loaded {', '.join(parts)} from {folder}{layout}{skipped}")
        return with_reference

    def save(self) -> Path:
        """Save everything that a resumed run needs, into `save` of the configuration; a second call without a step in
        between writes nothing.

        With `async_save` this returns when the state is copied, unless it is the end of the run. A save before that is
        still being written is waited for.

        Returns:
            The checkpoint's folder; with `async_save` it may not exist yet.

        Raises:
            CheckpointError: on every rank, if any rank could not write; earlier checkpoints are unchanged.
        """
        state, iteration, keep = self._state, self._state.progress.iteration, self._state.config.checkpoint.keep
        folder, record = self._folder(), self._record
        assert record is not None
        checkpoint = self.saved()
        if checkpoint is None:
            self.tolerate(self.wait)
            self._saved = None
            self._start_uploads()
            self._make_room()
            self._save_reference(folder)
            if self._asynchronous is None and state.config.checkpoint.async_save:
                self._asynchronous = AsynchronousSaves(state.platform.device, self._save_succeeded)
            asynchronous, uploads = self._asynchronous, self._uploads
            if state.config.remote_save is None:
                follow_up = self._prune_references(folder, keep)
            else:  # what is uploaded is removed after its upload
                keep, follow_up = None, uploads.check if uploads is not None else None
            checkpoint = save_checkpoint(state, folder, record, keep, asynchronous, follow_up)
            self._saved = (checkpoint, iteration)
            if asynchronous is None:
                self._save_succeeded()
                logger.info_rank_0(f"checkpoint of iteration {iteration}: {checkpoint}")
        else:
            self._save_reference(folder)
        if self._asynchronous is not None and iteration >= derived.train_iters(state.config):
            self.wait()
        return checkpoint

    def _start_uploads(self) -> None:
        """Start to send the checkpoints in the staging folder, on global rank 0."""
        config = self._state.config
        is_needed = config.remote_save is not None and self._uploads is None
        if is_needed and self._state.parallel.world.rank == 0:
            limit = config.checkpoint.upload_limit_gib
            self._uploads = Uploads(
                Path(self._folder()).expanduser(),
                str(config.remote_save),
                config.checkpoint.keep,
                None if limit is None else limit * 2**30,
            )
            atexit.register(self.finish_uploads)  # a program that ends without `close`

    def _make_room(self) -> None:
        """Make room for another checkpoint by `on_upload_limit`."""
        config, uploads, is_waiting = self._state.config, self._uploads, False
        if config.remote_save is None:
            return

        def has_room() -> bool:
            return uploads is None or uploads.make_room(config.checkpoint.on_upload_limit)

        while not on_rank_0(has_room):
            if not is_waiting:
                logger.info_rank_0("the save waits for uploads: megatron_wrap.checkpoint.on_upload_limit is wait")
            is_waiting = True
            time.sleep(1.0)

    def finish_uploads(self) -> None:
        """Wait for the uploads to a remote `save`, at most `upload_wait_minutes`; a second call does nothing. No
        communication."""
        if self._uploads is not None:
            atexit.unregister(self.finish_uploads)
            self._uploads.finish(self._state.config.checkpoint.upload_wait_minutes)
            self._uploads = None

    def leave_uploads(self) -> None:
        """End uploads without waiting for them, because of an error; the next start of the run continues them."""
        if self._uploads is not None:
            atexit.unregister(self.finish_uploads)
            self._uploads.close()
            self._uploads = None

    def _save_succeeded(self) -> None:
        self._failed_saves = 0

    def tolerate(self, action: Callable[[], object]) -> None:
        """Call a function that saves or waits for a save; with `on_save_error: continue` a failure is only logged.

        Raises:
            CheckpointError: the save failed, and `on_save_error` is stop or too many in a row have failed.
        """
        try:
            action()
        except CheckpointError as error:
            if self._state.config.checkpoint.on_save_error == "stop" or self._failed_saves == _MAX_FAILED_SAVES:
                raise
            self._failed_saves += 1
            if self._failed_saves == _MAX_FAILED_SAVES:
                raise CheckpointError(f"{error}; this is the last of {_MAX_FAILED_SAVES} in a row") from error
            logger.warning_rank_0(
                f"{error}; the run continues, this is failure {self._failed_saves} of {_MAX_FAILED_SAVES} in a row"
            )

    def _prune_references(self, folder: str, keep: int | None) -> Callable[[], None] | None:
        """The function that removes the reference models of removed checkpoints, on rank 0; None if checkpoints have
        none."""
        state = self._state
        if state.reference is None or state.reference.settings.update_interval is None:
            return None
        best = state.best.iteration
        return lambda: prune_references(folder, keep, best)

    def poll(self) -> None:
        """Raise the failure of an asynchronous save; to be called after each step.

        Raises:
            CheckpointError: on every rank, after the same step.
        """
        asynchronous, iteration = self._asynchronous, self._state.progress.iteration
        if asynchronous is not None:
            self.tolerate(lambda: asynchronous.poll(iteration))

    def wait(self) -> None:
        """Wait until an asynchronous save is complete.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        if self._asynchronous is not None:
            with doing(SAVE):
                self._asynchronous.wait()

    def close(self) -> None:
        """End an asynchronous save, without communication, and its writer process, and wait for uploads."""
        if self._asynchronous is not None:
            self._asynchronous.close()
            self._asynchronous = None
        self.finish_uploads()

    def _save_reference(self, folder: str) -> None:
        """Save the reference model, unless no checkpoint includes it or it was saved before. This precedes the save of
        the run, so that a visible checkpoint has its reference."""
        reference = self._state.reference
        if reference is None or self._record is None or not is_saved(reference):
            return
        target = folder, saved_iteration(reference, self._state.progress)
        if self._reference_saved != target:
            save_reference(self._state, folder, self._record)
            self._reference_saved = target

    def saved(self) -> Path | None:
        """The checkpoint that contains the current state, which may still be written; None if there is none."""
        iteration = self._state.progress.iteration
        checkpoint = CheckpointStore(self._folder()).folder_of(iteration)
        asynchronous = self._asynchronous
        is_saved_here = self._saved == (checkpoint, iteration)

        def is_there() -> bool:
            is_written_now = asynchronous is not None and asynchronous.is_writing(checkpoint)
            return is_written_now or missing_part(checkpoint) is None

        return checkpoint if is_saved_here and on_rank_0(is_there) else None

    def ended(self, how: str) -> str:
        """A sentence for a run that ended before its last step: its iteration, its newest checkpoint, and how to
        continue. An asynchronous save ends first. No communication.

        Args:
            how: first words of the sentence, such as "interrupted".
        """
        if self._asynchronous is not None:
            self._asynchronous.finish_alone()
        config, iteration = self._state.config, self._state.progress.iteration
        ended = f"{how} after iteration {iteration} of {derived.train_iters(config)}"
        if config.train.save is None:
            return f"{ended}; nothing was saved, because megatron_lm.train.common.save is null"
        store = CheckpointStore(config.train.save)
        newest = store.latest()
        if newest is None:
            return f"{ended}; there is no checkpoint yet, so the same command starts again"
        resumes = "the same command resumes from it"
        if config.checkpoint.resume == "never":
            resumes = "to resume from it, set megatron_wrap.checkpoint.resume=auto"
        return f"{ended}; newest checkpoint: {store.find(newest)}; {resumes}"

    def record_best(self) -> None:
        """Record in the checkpoint folder that the checkpoint of the current iteration has the best evaluation, once it
        is complete.

        Raises:
            CheckpointError: on every rank, if the file cannot be written.
        """
        store, iteration = CheckpointStore(self._folder()), self._state.progress.iteration
        asynchronous = self._asynchronous

        record = partial(store.record_best, iteration)

        def record_when_published() -> None:
            if asynchronous is None or not asynchronous.after_publication(store.folder_of(iteration), record):
                record()

        on_rank_0(record_when_published, f"{store.folder / BEST} cannot be written: {{}}")

    def _folder(self) -> str:
        folder = self._state.config.train.save
        if folder is None:
            raise CheckpointError("wrap.save: megatron_lm.train.common.save is null; set it to a folder")
        return folder


def _warn_of_newer(store: CheckpointStore) -> None:
    """Warn about checkpoints newer than the tracker's, on rank 0. There are some after the tracker was set back by
    hand, or after a kill between the rename and the tracker's update."""
    latest, newer = store.latest(), store.iterations()[-1:]
    if latest is not None and newer != [latest]:
        logger.warning_rank_0(
            f"{store.folder / TRACKER} names iteration {latest}, so the checkpoint of iteration {newer[0]} is not "
            f"resumed; write {newer[0]} into that file to resume it"
        )


def _length_key(config: RunConfig) -> str:
    """The YAML key that sets the length of a run."""
    set_keys = [name for name in ("train_epochs", "train_samples") if getattr(config.train, name) is not None]
    return f"megatron_lm.train.common.{[*set_keys, 'train_iters'][0]}"
