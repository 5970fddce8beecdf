"""Changes of a run's checkpoint folder: complete checkpoints are renamed to their final names and the tracker is
updated, old checkpoints are removed, damaged ones renamed.

A checkpoint is written into a hidden folder, flushed to disk, and published with one rename; then the tracker is
replaced, again by a rename. So the newest visible checkpoint is complete at any moment, even if a process is killed.
Nothing here needs torch, and only one process (global rank 0) may write.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.complete_checkpoints import BEST, MANIFEST, TRACKER, CheckpointFolder, missing_part
from megatron_wrap.checkpoint.files.hashes import digest, hash_files
from megatron_wrap.utils.atomic_write import write_atomically


class CheckpointStore(CheckpointFolder):
    """The checkpoints in one folder, which need not exist yet, and their changes."""

    def begin(self, iteration: int) -> Path:
        """Create an empty hidden folder for the checkpoint of `iteration`, and remove the hidden folders of killed
        processes.

        Its name is unique, so a writer process that outlives its killed run cannot write into a later save.

        Raises:
            OSError: the folder cannot be created.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        partial = self._hidden_name(iteration, "partial")
        partial.mkdir()
        return partial

    def commit(
        self, partial: Path, iteration: int, facts: Mapping[str, Any], hashes: Mapping[str, Any] | None = None
    ) -> Path:
        """Flush a folder from `begin` to disk, publish it as the checkpoint of `iteration`, and update the tracker.

        An older checkpoint of the same iteration stays valid until the new one is renamed.

        Args:
            facts: JSON values for the manifest.
            hashes: from `hash_files`, of files that need not be read again.

        Raises:
            OSError: a write failed; earlier checkpoints are unchanged.
        """
        final, content = self.folder_of(iteration), sorted(partial.rglob("*"))
        sizes = {str(path.relative_to(partial)): _make_durable(path) for path in content if path.is_file()}
        known = {name: entry for name, entry in (hashes or {}).items() if name in sizes}
        known |= hash_files(partial, [name for name in sizes if name not in known])
        manifest = {**facts, "iteration": iteration, "files": sizes, "hashes": known}
        manifest = json.loads(json.dumps(manifest))
        write_atomically(partial / MANIFEST, json.dumps({**manifest, "digest": digest(manifest)}, indent=1))
        for folder in (partial, *(path for path in content if path.is_dir())):
            _make_durable(folder)
        replaced = self._hidden_name(iteration, "replaced") if final.exists() else None
        if replaced is not None:
            final.rename(replaced)
        partial.rename(final)
        _make_durable(self.folder)
        self._replace(TRACKER, iteration)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    def record_best(self, iteration: int) -> None:
        """Record that the checkpoint of `iteration` has the best evaluation.

        Raises:
            OSError: the file cannot be written.
        """
        self._replace(BEST, iteration)

    def set_aside(self, checkpoint: Path) -> Path | None:
        """Rename a damaged checkpoint, so that the newest complete one before it is the latest.

        Returns:
            The new path; None if nothing was renamed, because there is no complete checkpoint before it.

        Raises:
            OSError: the folder cannot be renamed.
        """
        earlier = [iteration for iteration in self.iterations() if self.folder_of(iteration) < checkpoint]
        if not earlier:
            return None
        target = checkpoint.with_name(f"{checkpoint.name}.damaged-{secrets.token_hex(4)}")
        checkpoint.rename(target)
        self._replace(TRACKER, earlier[-1])
        return target

    def prune(self, keep: int | None, best: int | None = None) -> list[int]:
        """Remove all but the `keep` (at least one) newest complete checkpoints up to the latest one.

        Checkpoints newer than `latest` (after the tracker was set back by hand) and incomplete ones are kept.

        Args:
            best: iteration of a further checkpoint to keep.

        Returns:
            The iterations removed; none if keep is None.
        """
        latest = self.latest()
        if keep is None or latest is None:
            return []
        candidates = [iteration for iteration in self.iterations() if iteration <= latest]
        removed = []
        for iteration in candidates[: -max(1, keep)]:
            if iteration == best:
                continue
            if self.remove(iteration):
                removed.append(iteration)
        return removed

    def remove(self, iteration: int) -> bool:
        """Remove the checkpoint of `iteration`; False if it cannot be renamed and so remains."""
        # rename first: a partly removed checkpoint must not be visible
        hidden = self._hidden_name(iteration, "removed")
        try:
            self.folder_of(iteration).rename(hidden)
        except OSError:
            return False  # an extra checkpoint does no harm
        shutil.rmtree(hidden, ignore_errors=True)
        return True

    def record_newest(self, iteration: int) -> None:
        """Set the tracker to a complete checkpoint that was copied into the folder.

        Raises:
            OSError: the file cannot be written.
        """
        self._replace(TRACKER, iteration)

    def _replace(self, name: str, iteration: int) -> None:
        """Replace a file of the folder, which contains the old or the new content at any moment."""
        write_atomically(self.folder / name, str(iteration))
        _make_durable(self.folder)

    def _hidden_name(self, iteration: int, kind: str) -> Path:
        return self.folder / f".{self.folder_of(iteration).name}.{kind}-{secrets.token_hex(4)}"

    def _clean(self) -> None:
        for path, of, kind in self._hidden():
            final = self.folder / of
            if kind == "replaced" and missing_part(final) is not None and missing_part(path) is None:
                shutil.rmtree(final, ignore_errors=True)
                path.rename(final)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _make_durable(path: Path) -> int:
    """Flush a file or folder to disk; returns its size in bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # some network file systems do not support fsync of a folder
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
