"""Finds the complete checkpoints of a run's folder and the latest one: one subfolder for each iteration, and a tracker
file. `publish_and_prune.py` writes them.

Names are Megatron-LM's (megatron/training/checkpointing.py): `iter_0000010/` and `latest_checkpointed_iteration.txt`.
Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.hashes import find_damage, manifest_damage
from megatron_wrap.errors import special_file
from megatron_wrap.inside_folder import leaves_folder

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
"""File with the iteration of the checkpoint with the best evaluation, in the format of the tracker."""
MANIFEST = "megatron_wrap.json"
"""File with facts about the checkpoint and the size and hashes of each of its files; written last, before the
rename."""
FORMAT_FILES = ("metadata.json", ".metadata")
"""Files that Megatron-Core writes at the end of a distributed checkpoint."""
_MAX_DIGITS = 18
"""Largest number of digits of an iteration; a tracker with more is damaged."""
RESOLVED = "resolved.yaml"
"""File with the run's resolved configuration."""

REFERENCE = "reference"
"""Subfolder of a run's checkpoint folder, with the checkpoints of its reference model."""

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
        facts = json.loads(manifest.read_text(encoding="utf-8"))
        sizes, hashes, problem = dict(facts["files"]), dict(facts["hashes"]), manifest_damage(facts)
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
    return missing_part(checkpoint) or find_damage(checkpoint, read_facts(checkpoint).get("hashes") or {})


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """The manifest: the facts passed to `CheckpointStore.commit`, the iteration and the file sizes; empty if there is
    none (saved by Megatron-LM)."""
    try:
        return json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
