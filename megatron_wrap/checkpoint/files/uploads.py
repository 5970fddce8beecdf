"""The thread of global rank 0 that sends published checkpoints to a remote folder while the run trains on."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.downloads import RemoteStore
from megatron_wrap.checkpoint.files.run_folder import (
    BEST,
    MANIFEST,
    REFERENCE,
    TRACKER,
    CheckpointStore,
    folder_name,
    missing_part,
    read_manifest,
)
from megatron_wrap.errors import CheckpointError
from megatron_wrap.metrics.number_format import counted, with_prefix
from megatron_wrap.remote.files import describe
from megatron_wrap.utils.atomic_write import write_atomically
from megatron_wrap.utils.dist_logger import logger

RECORD = ".uploads.json"
"""File in the staging folder that lists what has been sent, so that a restarted run does not send it again."""
_MAX_PAUSE_SECONDS = 60.0
_POLL_SECONDS = 0.2
_DEFAULT_COPIES = 3


class Uploads:
    """Sends the complete checkpoints of a staging folder, oldest first; a failed attempt is repeated after a pause that
    grows to a minute. An uploaded checkpoint is removed from the staging folder when there is a newer one.

    Args:
        staging: the run's local checkpoint folder.
        url: of the remote folder.
        keep: number of newest checkpoints to keep there, in addition to the best; None: all.
        limit_bytes: largest total size of the checkpoints that wait; None: three times the size of the newest.
    """

    def __init__(self, staging: Path, url: str, keep: int | None, limit_bytes: float | None) -> None:
        self._store, self._url, self._keep, self._limit = CheckpointStore(staging), url.rstrip("/"), keep, limit_bytes
        self._record = _read_record(staging / RECORD, self._url)
        self._lock = threading.Lock()
        self._wake, self._ends = threading.Event(), threading.Event()
        self._current: int | None = None
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="upload of checkpoints", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Look for checkpoints to send; called after each save."""
        self._wake.set()

    def waiting(self) -> list[int]:
        """Iterations of the complete checkpoints that are not sent yet, ascending."""
        return [iteration for iteration in self._store.iterations() if not self._is_sent(iteration)]

    def make_room(self, policy: str) -> bool:
        """Whether another checkpoint may wait for its upload; called when a save begins.

        Args:
            policy: `drop_oldest` removes the oldest ones that wait, but for the newest one and the one being sent, and
                always has room; `wait` has none; `stop` raises.

        Raises:
            CheckpointError: there is no room, and the policy is stop.
        """
        while True:
            waiting = self.waiting()
            sizes = {iteration: _size(self._store.folder_of(iteration)) for iteration in waiting}
            newest = sizes[waiting[-1]] if waiting else 0
            limit = _DEFAULT_COPIES * newest if self._limit is None else self._limit
            if sum(sizes.values()) + newest <= limit or not waiting:
                return True
            state = f"{counted(len(waiting), 'checkpoint')} ({with_prefix(sum(sizes.values()))}B) wait for their upload"
            why = f"to {self._url}{f' ({self._failure})' if self._failure else ''}"
            if policy == "stop":
                raise CheckpointError(
                    f"{state} {why}, in {self._store.folder}: the limit is {with_prefix(limit)}B; make the store "
                    "reachable and start again, or set another megatron_wrap.checkpoint.on_upload_limit"
                )
            if policy == "wait":
                return False
            with self._lock:
                droppable = [iteration for iteration in waiting[:-1] if iteration != self._current]
                if not droppable:
                    return True
                self._store.remove(droppable[0])
            logger.warning_rank_0(f"{state} {why}: that of iteration {droppable[0]} is dropped")

    def finish(self, minutes: float) -> None:
        """Wait at most `minutes` until everything is sent; the rest is logged, and sent by the next start of the
        run."""
        end, is_announced = time.monotonic() + 60 * minutes, False
        while self.waiting() or self._current is not None:
            if not is_announced and self.waiting():
                logger.info_rank_0(f"waiting for the upload to {self._url}, at most {minutes:g} minutes")
                is_announced = True
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        self.close()

    def close(self) -> None:
        """End the thread after the file that it is sending; a second call does nothing."""
        if self._ends.is_set():
            return
        self._ends.set()
        self._wake.set()
        self._thread.join(timeout=_POLL_SECONDS if self._current is not None else None)
        left = self.waiting()
        if left:
            logger.warning_rank_0(
                f"not in {self._url}: {', '.join(folder_name(iteration) for iteration in left)}"
                f"{f' ({self._failure})' if self._failure else ''}; "
                f"kept in {self._store.folder}, from where the next start of this run sends "
                f"{'it' if len(left) == 1 else 'them'}"
            )

    def _run(self) -> None:
        pause = 1.0
        while not self._ends.is_set():
            self._wake.clear()
            try:
                for iteration in self.waiting():
                    self._send_now(iteration)
                    pause, self._failure = 1.0, None
                self._wake.wait()
            except _Ended:
                return
            except Exception as error:  # stores raise different exceptions
                if self._ends.is_set():
                    return
                self._failure = describe(error)
                logger.warning_rank_0(
                    f"upload to {self._url} failed: {self._failure}; training continues, next try after {pause:.0f} s"
                )
                self._ends.wait(pause)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _send_now(self, iteration: int) -> None:
        with self._lock:
            if missing_part(self._store.folder_of(iteration)) is not None:
                return  # it was dropped
            self._current = iteration
        try:
            self._send(iteration)
        finally:
            self._current = None

    def _send(self, iteration: int) -> None:
        """Send one checkpoint, with its reference model and the tracker, and remove older ones."""
        start, remote = time.monotonic(), RemoteStore(self._url, attempts=1)
        if self._ends.is_set():
            raise _Ended
        references = CheckpointStore(self._store.folder / REFERENCE)
        earlier = (references.folder_of(number) for number in references.iterations() if number <= iteration)
        folders = {f"{REFERENCE}/{path.name}": path for path in earlier}
        folders = {name: path for name, path in folders.items() if not self._has(name, path)}
        folders[folder_name(iteration)] = self._store.folder_of(iteration)
        digests = {name: read_manifest(path)["digest"] for name, path in folders.items()}
        best = self._store.best()
        numbers = {TRACKER: iteration, **({BEST: best} if best is not None else {})}
        outdated = remote.outdated(self._keep, iteration, best)
        if remote.folder.has_commits:
            files: dict[str, Path | bytes] = {
                f"{name}/{file}": path / file for name, path in folders.items() for file in [*_files(path), MANIFEST]
            }
            files |= {name: str(number).encode() for name, number in numbers.items()}
            remote.folder.commit(files, outdated, f"Checkpoint of iteration {iteration}")
        else:
            for name, path in folders.items():
                self._send_folder(remote, name, path)
            for name, number in numbers.items():
                remote.folder.write(name, str(number).encode())
            remote.folder.remove(outdated)
        self._remember(complete=digests)
        logger.info_rank_0(
            f"uploaded the checkpoint of iteration {iteration} to {self._url} in {time.monotonic() - start:.1f} s"
        )
        self._clean(references)

    def _send_folder(self, remote: RemoteStore, name: str, path: Path) -> None:
        """Send the files of a checkpoint that the remote folder lacks, then its manifest."""
        manifest = f"{name}/{MANIFEST}"
        if manifest in remote.sizes:
            remote.folder.remove([manifest])  # of another save of this iteration
        wanted = _files(path)
        missing = {
            f"{name}/{file}": path / file
            for file, (size, digest) in wanted.items()
            if self._record["sent"].get(f"{name}/{file}") != digest or remote.sizes.get(f"{name}/{file}") != size
        }

        def sent(file: str) -> None:
            self._remember(sent={file: wanted[file[len(name) + 1 :]][1]})
            if self._ends.is_set():
                raise _Ended

        remote.folder.upload(missing, sent)
        remote.folder.upload({manifest: path / MANIFEST}, lambda file: None)

    def _clean(self, references: CheckpointStore) -> None:
        """Remove local copies of checkpoints that were sent, except for the newest."""
        with self._lock:
            for store, prefix in ((self._store, ""), (references, f"{REFERENCE}/")):
                for iteration in store.iterations()[:-1]:
                    if self._has(prefix + folder_name(iteration), store.folder_of(iteration)):
                        store.remove(iteration)

    def _is_sent(self, iteration: int) -> bool:
        return self._has(folder_name(iteration), self._store.folder_of(iteration))

    def _has(self, name: str, path: Path) -> bool:
        return self._record["complete"].get(name) == read_manifest(path).get("digest", "")

    def _remember(self, **entries: dict[str, str]) -> None:
        with self._lock:
            for part, values in entries.items():
                self._record[part] |= values
                for name in values if part == "complete" else ():
                    sent = self._record["sent"]
                    self._record["sent"] = {
                        file: digest for file, digest in sent.items() if not file.startswith(f"{name}/")
                    }
            with contextlib.suppress(OSError):  # what is not recorded is sent again
                write_atomically(self._store.folder / RECORD, json.dumps(self._record))


class _Ended(Exception):
    """The run is ending, so the thread waits no longer."""


def _files(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Name of each file but the manifest -> size in bytes, and hash."""
    manifest = read_manifest(checkpoint)
    return {name: (size, manifest["hashes"][name]["list"]) for name, size in manifest["files"].items()}


def _size(checkpoint: Path) -> int:
    return sum(read_manifest(checkpoint).get("files", {}).values())


def _read_record(path: Path, url: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["url"] == url:
            return record
    return {"url": url, "sent": {}, "complete": {}}
