"""A run's checkpoint folder: one subfolder for each iteration, and a tracker file. Finds the complete checkpoints and
the latest one, publishes a new one, removes old ones, renames damaged ones.

A checkpoint is written into a hidden folder, flushed to disk, and published with one rename; then the tracker is
replaced, again by a rename. So the newest visible checkpoint is complete at any moment, even if a process is killed.
Names are Megatron-LM's (megatron/training/checkpointing.py): `iter_0000010/` and `latest_checkpointed_iteration.txt`.
Nothing here needs torch, and only one process (global rank 0) may write.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.hashed_files import digest, find_damage, hash_files, manifest_damage
from megatron_wrap.errors import special_file
from megatron_wrap.inside_folder import leaves_folder
from megatron_wrap.utils.atomic_write import write_atomically

TRACKER = "latest_checkpointed_iteration.txt"

BEST = "best_checkpointed_iteration.txt"
"""File with the iteration of the checkpoint with the best evaluation, in the format of the tracker."""

MANIFEST = "megatron_wrap.json"
"""File with metadata of the checkpoint and the size and hashes of each of its files; written last, before the
rename."""

FORMAT_FILES = ("metadata.json", ".metadata")
"""Files that Megatron-Core writes at the end of a distributed checkpoint."""

RESOLVED = "resolved.yaml"
"""File with the run's resolved configuration."""

REFERENCE = "reference"
"""Subfolder of a run's checkpoint folder, with the checkpoints of its reference model."""

_MAX_DIGITS = 18
"""Largest number of digits of an iteration; a tracker with more is damaged."""

_VISIBLE = re.compile(r"iter_(\d{7,})")

_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(partial|replaced|removed)-[0-9a-f]+")


class CheckpointFolder:
    """The checkpoints in one folder; the folder need not exist yet."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()

    def folder_of(self, iteration: int) -> Path:
        """Path of the checkpoint of `iteration`, whether it exists or not."""
        return self.folder / folder_name(iteration)

    def find(self, iteration: int) -> Path | None:
        """Path of the complete checkpoint of `iteration`; None if there is none.

        Normally this is `folder_of`. If a process was killed while it replaced a checkpoint of the same iteration, it
        is the hidden older one.
        """
        candidates = [self.folder_of(iteration)]
        candidates += [path for path, of, kind in self._hidden() if kind == "replaced" and of == candidates[0].name]
        return next((path for path in candidates if missing_part(path) is None), None)

    def iterations(self) -> list[int]:
        """Iterations with a complete checkpoint, ascending."""
        return [iteration for iteration in self.present() if self.find(iteration) is not None]

    def present(self) -> list[int]:
        """Iterations with a folder, complete or not, ascending."""
        names = {path.name for path in self._entries()}
        names |= {of for _, of, kind in self._hidden() if kind == "replaced"}
        return sorted(int(match[1]) for name in names if (match := _VISIBLE.fullmatch(name)))

    def tracked(self) -> str | None:
        """Content of the tracker: an iteration or `release`; None if there is no tracker."""
        if special_file(self.folder / TRACKER) is not None:
            return None
        try:
            return (self.folder / TRACKER).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None

    def latest(self) -> int | None:
        """Iteration of the newest complete checkpoint: the tracker's, or the largest one if there is no tracker or its
        checkpoint is missing or incomplete; None if there is none."""
        tracked = self.tracked()
        is_number = tracked is not None and tracked.isdecimal() and len(tracked) <= _MAX_DIGITS
        if tracked is not None and is_number and self.find(int(tracked)) is not None:
            return int(tracked)
        return max(self.iterations(), default=None)

    def best(self) -> int | None:
        """Iteration that `record_best` wrote; None if there is none."""
        try:
            return int((self.folder / BEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def passed_over(self) -> dict[Path, str]:
        """Damaged and incomplete checkpoints that are newer than `latest`, with the reason."""
        latest = self.latest()
        newer = [] if latest is None else [iteration for iteration in self.present() if iteration > latest]
        reasons = {self.folder_of(iteration): missing_part(self.folder_of(iteration)) for iteration in newer}
        return {path: reason for path, reason in reasons.items() if reason is not None and path.is_dir()}

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir())
        except OSError:
            return []

    def _hidden(self) -> list[tuple[Path, str, str]]:
        """Path, name of the checkpoint, and kind of each hidden folder."""
        matches = ((path, _HIDDEN.fullmatch(path.name)) for path in self._entries())
        return [(path, match[1], match[2]) for path, match in matches if match]


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
        self, partial: Path, iteration: int, metadata: Mapping[str, Any], hashes: Mapping[str, Any] | None = None
    ) -> Path:
        """Flush a folder from `begin` to disk, publish it as the checkpoint of `iteration`, and update the tracker.

        An older checkpoint of the same iteration stays valid until the new one is renamed.

        Args:
            metadata: JSON values for the manifest.
            hashes: from `hash_files`, of files that need not be read again.

        Raises:
            OSError: a write failed; earlier checkpoints are unchanged.
        """
        final, content = self.folder_of(iteration), sorted(partial.rglob("*"))
        sizes = {str(path.relative_to(partial)): _make_durable(path) for path in content if path.is_file()}
        known = {name: entry for name, entry in (hashes or {}).items() if name in sizes}
        known |= hash_files(partial, [name for name in sizes if name not in known])
        manifest = {**metadata, "iteration": iteration, "files": sizes, "hashes": known}
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


def folder_name(iteration: int) -> str:
    """Name of the checkpoint of `iteration`."""
    return f"iter_{iteration:07d}"


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user can write into the folder's file system; None if it does not report
    them. Quotas are not known."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def missing_part(checkpoint: Path) -> str | None:
    """The reason why a checkpoint's folder is incomplete, as text; None if it is complete.

    With a manifest every file must exist with its size, which detects an interrupted copy, and the small files must
    have their SHA-256; `.distcp` files are read only by a load. Without a manifest, which means a checkpoint of
    Megatron-LM, the files that Megatron-Core writes last must exist.
    """
    if not checkpoint.is_dir():
        return "the folder is missing"
    for name in (*FORMAT_FILES, RESOLVED, MANIFEST):
        problem = leaves_folder(checkpoint, name)
        if problem is not None:
            return f"it {problem}"
    for name in FORMAT_FILES:
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return f"{MANIFEST} is missing" if (checkpoint / RESOLVED).exists() else None
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        sizes, hashes, problem = dict(content["files"]), dict(content["hashes"]), manifest_damage(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if problem is not None:
        return f"{MANIFEST} {problem}"
    if not hashes.keys() <= sizes.keys():
        return f"{MANIFEST} has the hash of {min(hashes.keys() - sizes.keys())!r}, which is none of its files"
    for name, size in sizes.items():
        problem = leaves_folder(checkpoint, name)
        if problem is not None:
            return f"{MANIFEST} {problem}"
        if special_file(checkpoint / name) is not None:
            return f"{name} is a pipe, socket or device, not a file"
        try:
            actual_size = (checkpoint / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if actual_size != size:
            return f"{name} has {actual_size} bytes instead of {size}"
    small = {name: entry for name, entry in hashes.items() if name in sizes and not name.endswith(".distcp")}
    return find_damage(checkpoint, small)


def content_damage(checkpoint: Path) -> str | None:
    """The reason why a checkpoint is incomplete or differs from what was saved, after reading all files; None if it
    does not."""
    return missing_part(checkpoint) or find_damage(checkpoint, read_manifest(checkpoint).get("hashes") or {})


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest: the metadata passed to `CheckpointStore.commit`, the iteration, sizes and hashes of files; empty if
    there is none (saved by Megatron-LM)."""
    try:
        return json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def cannot_write(folder: Path, cause: str) -> str:
    """The message for a failed save."""
    return f"no checkpoint could be written to {folder}: {cause}; earlier checkpoints there are unchanged"


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
