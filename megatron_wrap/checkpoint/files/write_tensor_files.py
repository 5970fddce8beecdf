"""Writing of a rank's tensor files, in threads, each file hashed while it is written.

torch serializes a tensor into a stream. Another thread follows the writing and computes the SHA-256 of a block from the
operating system's cache of the file. The writing does not wait for it: a block that is not hashed in time is finished
while the next one is written, so that blocks of one file are hashed in parallel. Hashed files are written without the
CRC-32 that `torch.save` otherwise computes: nothing reads it, and it costs as much time as writing to memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_wrap.checkpoint.files.hashes import BLOCK_BYTES, PIECE_BYTES, entry_of, hash_block, hash_threads

if TYPE_CHECKING:
    from torch import Tensor

Index = tuple[str, tuple[int, ...] | None, int | None]
"""Name, offset and number of a part of a tensor, or of an object: torch's MetadataIndex."""
_BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class FileToWrite:
    """A file and its parts, in their order."""

    name: str
    parts: tuple[tuple[Index, Any], ...]
    """Pairs of index and content; a content is `bytes`, or an object that `write_files` converts to a tensor."""


def write_files(
    folder: Path, files: Sequence[FileToWrite], tensor_of: Callable[[Any], Tensor], *, hashed: bool = True
) -> dict[str, Any]:
    """Write files into a folder and flush them to disk.

    Args:
        tensor_of: converts the content of a part, unless it is bytes, to a tensor on the CPU whose storage has no other
            values.
        hashed: whether files are hashed; False only for measurements.

    Returns:
        JSON values: `parts`, the position and size of each part, and `hashes`, as of `hash_files`.

    Raises:
        OSError: a file cannot be written.
    """
    if not files:
        return {"parts": [], "hashes": {}}
    with (
        ThreadPoolExecutor(hash_threads()) as hashing,
        _threads_that_write(len(files), checksums=not hashed) as writing,
    ):

        def write(file: FileToWrite) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            with _HashedFile(folder / file.name, hashing if hashed else None) as stream:
                parts = [_write_part(stream, file.name, index, content, tensor_of) for index, content in file.parts]
                return parts, stream.finish()

        written = list(writing.map(write, files))
    hashes = {file.name: entry for file, (_, entry) in zip(files, written, strict=True) if hashed}
    return {"parts": [part for parts, _ in written for part in parts], "hashes": hashes}


@contextlib.contextmanager
def _threads_that_write(count: int, *, checksums: bool) -> Iterator[ThreadPoolExecutor]:
    """Threads in which `torch.save` writes the CRC-32 or omits it. Depending on torch's release, its option belongs to
    a thread or to the process."""
    from torch.serialization import get_crc32_options, set_crc32_options

    before = get_crc32_options()
    try:
        with ThreadPoolExecutor(count, initializer=set_crc32_options, initargs=(checksums and before,)) as pool:
            yield pool
    finally:
        set_crc32_options(before)


def _write_part(
    stream: _HashedFile, name: str, index: Index, content: Any, tensor_of: Callable[[Any], Tensor]
) -> dict[str, Any]:
    """Write a part as torch's FileSystemWriter does: each tensor in the format of `torch.save`, one after the other."""
    offset = stream.size
    if isinstance(content, bytes):
        stream.write(content)
    else:
        _save_tensor(tensor_of(content), stream)
    return {"index": index, "file": name, "offset": offset, "length": stream.size - offset}


def _save_tensor(tensor: Tensor, stream: _HashedFile) -> None:
    import torch

    try:
        torch.save(tensor, stream)  # type: ignore[arg-type]
    except RuntimeError:
        if stream.error is not None:  # torch raises its own error, which does not name a full disk
            raise stream.error from None
        raise


class _Written:
    """The number of bytes of a file that have been written, shared by threads."""

    def __init__(self) -> None:
        self._changed, self._bytes = threading.Condition(), 0.0

    def set(self, num_bytes: float) -> None:
        """Set the number of bytes that can be read; infinite if no more will be written."""
        with self._changed:
            self._bytes = num_bytes
            self._changed.notify_all()

    def wait_for(self, num_bytes: int) -> None:
        """Wait until the file has that many bytes, or no more are written."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= num_bytes)


class _HashedFile:
    """A new file whose blocks are hashed in `pool` while they are written; without a pool they are not hashed."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor | None) -> None:
        self._path, self._pool = path, pool
        self._stream: IO[bytes] = path.open("wb", buffering=_BUFFER_BYTES)
        self._blocks: list[Future[str]] = []
        self._written, self._flushed = _Written(), 0
        self.size = 0
        """Number of bytes written."""
        self.error: OSError | None = None
        """Error of a failed write; None if there is none."""

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._written.set(math.inf)
        self._stream.close()

    def write(self, data: bytes) -> int:
        try:
            written = self._stream.write(data)
            self.size += written
            if self._pool is not None and self.size - self._flushed >= PIECE_BYTES:
                self._flush_for_hashes()
        except OSError as error:
            self.error = error
            raise
        return written

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> dict[str, Any]:
        """Flush the file to disk; returns its entry in the manifest."""
        self._flush_for_hashes()
        self._written.set(math.inf)
        os.fsync(self._stream.fileno())
        return entry_of([block.result() for block in self._blocks])

    def _flush_for_hashes(self) -> None:
        """Make the written bytes readable, and begin to hash the blocks that contain them."""
        self._stream.flush()
        self._flushed = self.size
        self._written.set(self.size)
        if self._pool is not None:
            for index in range(len(self._blocks), -(-self.size // BLOCK_BYTES)):
                self._blocks.append(self._pool.submit(hash_block, self._path, index, self._written.wait_for))
