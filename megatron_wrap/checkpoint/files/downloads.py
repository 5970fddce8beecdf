"""The checkpoints of a remote folder, and their downloads. Names are as in `files/run_folder.py`.

The manifest of a checkpoint is sent after its other files, and the tracker after the manifest. Needs neither torch nor
Megatron-Core.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.run_folder import (
    MANIFEST,
    REFERENCE,
    TRACKER,
    CheckpointStore,
    content_damage,
    folder_name,
    missing_part,
    read_manifest,
)
from megatron_wrap.errors import CheckpointError
from megatron_wrap.remote.files import ATTEMPTS, RemoteFolder, describe, with_retries
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.file_lock import locked

_NAME = re.compile(r"iter_(\d{7,18})")
_MANIFEST_NAME = re.compile(rf"iter_(\d{{7,18}})/{re.escape(MANIFEST)}")


class RemoteStore:
    """The checkpoints below a URL, as they were when the object was created.

    Args:
        attempts: number of attempts of each access.

    Raises:
        ConfigError: the URL cannot be used. CheckpointError: the folder cannot be read.
    """

    def __init__(self, url: str, attempts: int = ATTEMPTS) -> None:
        self._attempts = attempts
        self.folder = RemoteFolder(url)
        self.url = self.folder.url
        self.sizes: dict[str, int] = self._read(self.folder.sizes)
        """Name of each file -> its size in bytes."""

    def sent(self, prefix: str = "") -> list[int]:
        """Iterations with a manifest, ascending.

        Args:
            prefix: of a subfolder, `reference/`.
        """
        names = (name[len(prefix) :] for name in self.sizes if name.startswith(prefix))
        return sorted(int(match[1]) for name in names if (match := _MANIFEST_NAME.fullmatch(name)))

    def present(self) -> list[int]:
        """Iterations with a file, ascending."""
        parts = {name.partition("/")[0] for name in self.sizes}
        return sorted(int(match[1]) for part in parts if (match := _NAME.fullmatch(part)))

    def newest_first(self) -> list[int]:
        """Iterations with a manifest, newest first: those up to the tracker's iteration, or all if that has no
        manifest."""
        sent, tracked = self.sent(), self.number(TRACKER)
        return [
            iteration for iteration in reversed(sent) if tracked not in sent or tracked is None or iteration <= tracked
        ]

    def number(self, name: str) -> int | None:
        """The iteration in the tracker, or in the record of the best; None if there is none."""
        content = self._read(lambda: self.folder.read(name)) if name in self.sizes else None
        return int(content) if content is not None and re.fullmatch(rb"\s*\d{1,18}\s*", content) else None

    def manifest(self, iteration: int) -> dict[str, Any]:
        """The manifest of a checkpoint; empty if there is none or it cannot be read."""
        content = self._read(lambda: self.folder.read(f"{folder_name(iteration)}/{MANIFEST}"))
        with contextlib.suppress(ValueError):
            manifest = json.loads(content or b"{}")
            return manifest if isinstance(manifest, dict) else {}
        return {}

    def missing_part(self, iteration: int) -> str | None:
        """The reason why a checkpoint is incomplete, by the names and sizes of its files; None if it is complete."""
        name = folder_name(iteration)
        if f"{name}/{MANIFEST}" not in self.sizes:
            return f"{MANIFEST} is missing: not all files were sent"
        files = self.manifest(iteration).get("files")
        if not isinstance(files, dict):
            return f"{MANIFEST} cannot be read"
        for file, size in files.items():
            there = self.sizes.get(f"{name}/{file}")
            if there != size:
                return f"{file} is missing" if there is None else f"{file} has {there} bytes instead of {size}"
        return None

    def names(self, folder: str) -> list[str]:
        """The files of a folder, the manifest last."""
        names = sorted(name for name in self.sizes if name.startswith(f"{folder}/"))
        return sorted(names, key=lambda name: name.endswith(f"/{MANIFEST}"))

    def outdated(self, keep: int | None, newest: int, best: int | None) -> list[str]:
        """Files of the checkpoints that are not to be kept, the manifest of each first; none if `keep` is None.

        Args:
            keep: number of newest checkpoints to keep, at least one.
            newest: iteration that was sent last; later ones are kept.
            best: iteration of a further one to keep.
        """
        if keep is None:
            return []
        earlier = [iteration for iteration in self.sent() if iteration < newest]
        removed = [iteration for iteration in earlier[: len(earlier) - (keep - 1)] if iteration != best]
        kept = {newest, *(iteration for iteration in self.present() if iteration not in removed)}
        references = self.sent(f"{REFERENCE}/")
        folders = [folder_name(iteration) for iteration in removed]
        folders += [f"{REFERENCE}/{folder_name(iteration)}" for iteration in references[:-1] if iteration not in kept]
        return [name for folder in folders for name in reversed(self.names(folder))]

    def download(self, iteration: int, folder: Path) -> str | None:
        """Copy a checkpoint into a new local folder, and verify it.

        Returns:
            The reason why it is damaged; None if it equals what was saved.
        """
        problem = self.missing_part(iteration)
        if problem is not None:
            return problem
        self._copy(folder_name(iteration), folder)
        return content_damage(folder)

    def download_reference(self, iteration: int, store: CheckpointStore) -> None:
        """Copy the reference model of a checkpoint that is in `store`, if there is one."""
        for number in {0, iteration}.intersection(self.sent(f"{REFERENCE}/")):
            name = f"{REFERENCE}/{folder_name(number)}"
            if missing_part(store.folder / name) is None:
                continue
            with _hidden(store.folder / REFERENCE) as hidden:
                self._copy(name, hidden)
                problem = content_damage(hidden)
                if problem is not None:
                    raise CheckpointError(f"{self.url}/{name} is damaged: {problem}; restore it")
                shutil.rmtree(store.folder / name, ignore_errors=True)
                hidden.rename(store.folder / name)

    def _copy(self, name: str, folder: Path) -> None:
        part = RemoteFolder(f"{self.url}/{name}")
        self._read(lambda: part.download([file[len(name) + 1 :] for file in self.names(name)], folder))

    def _read(self, action: Callable[[], Any]) -> Any:
        try:
            return with_retries(action, self.folder.url, self._attempts)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.folder.url} cannot be read: {describe(error)}") from None


def fetch_newest(
    url: str, folder: Path, strict: bool, below: int | None = None, keep_newer: bool = False
) -> int | None:
    """Download the newest undamaged checkpoint of a remote folder, unless the local folder has it; one process
    downloads, others wait.

    Args:
        folder: local; becomes a checkpoint folder with this one as the newest.
        strict: refuse a damaged checkpoint instead of taking the one before it.
        below: download only a checkpoint older than this iteration.
        keep_newer: nothing is downloaded if the local folder has a newer one, or the same.

    Returns:
        Its iteration; None if there is none.

    Raises:
        CheckpointError: the remote folder cannot be read, or has damaged checkpoints alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".download.lock", f"downloads {url}"):
        remote = RemoteStore(url)
        candidates = [iteration for iteration in remote.newest_first() if below is None or iteration < below]
        store = CheckpointStore(folder)
        latest = store.latest()
        if keep_newer and latest is not None and (not candidates or latest >= candidates[0]):
            return latest
        return _fetch_first(remote, candidates, store, strict)


def fetch_one(url: str, folder: Path) -> Path:
    """`fetch_newest` of one checkpoint, `URL/iter_0000010`; returns its local folder."""
    root, _, name = url.rstrip("/").rpartition("/")
    iteration = int(name.removeprefix("iter_"))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".download.lock", f"downloads {url}"):
        remote = RemoteStore(root)
        candidates = [iteration] if iteration in remote.present() else []
        if _fetch_first(remote, candidates, CheckpointStore(folder), strict=True) is None:
            raise CheckpointError(f"{url}: there is no such checkpoint")
    return folder / name


def is_one(url: str) -> bool:
    """Whether a URL is that of a single checkpoint."""
    return _NAME.fullmatch(url.rstrip("/").rpartition("/")[2]) is not None


def _fetch_first(remote: RemoteStore, candidates: Iterable[int], store: CheckpointStore, strict: bool) -> int | None:
    damaged: list[str] = []
    for iteration in candidates:
        name = folder_name(iteration)
        problem = None
        if not _is_here(remote, iteration, store):
            logger.info_all_ranks(f"downloading {remote.url}/{name} to {store.folder}")
            problem = _fetch(remote, iteration, store)
        if problem is None:
            remote.download_reference(iteration, store)
            store.record_newest(iteration)
            return iteration
        damaged.append(f"{remote.url}/{name} is damaged: {problem}")
        if strict:
            break
        logger.warning_all_ranks(f"{damaged[-1]}; the one before it is taken")
    if damaged:
        advice = "restore it, or take another folder"
        raise CheckpointError(f"{'; '.join(damaged)}; {advice if len(damaged) == 1 else 'no other is complete'}")
    return None


def _is_here(remote: RemoteStore, iteration: int, store: CheckpointStore) -> bool:
    local = store.find(iteration)
    return local is not None and read_manifest(local).get("digest") == remote.manifest(iteration).get("digest")


def _fetch(remote: RemoteStore, iteration: int, store: CheckpointStore) -> str | None:
    with _hidden(store.folder) as hidden:
        problem = remote.download(iteration, hidden)
        if problem is None:
            shutil.rmtree(store.folder_of(iteration), ignore_errors=True)
            hidden.rename(store.folder_of(iteration))
    return problem


@contextlib.contextmanager
def _hidden(parent: Path) -> Iterator[Path]:
    """Context with a path for a new folder in `parent`; at the end the folder is removed if it still exists."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(".download-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=parent, ignore_cleanup_errors=True) as temporary:
        yield Path(temporary, "checkpoint")
