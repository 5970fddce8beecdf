"""Writing of a rank's tensor files, in threads, each file hashed while it is written.

torch serializes a tensor into a stream. Another thread follows the writing and computes the SHA-256 of a block from
the operating system's cache of the file; the writing does not wait for it, and a block that is not hashed in time is
finished while the next one is written, so that blocks of one file are hashed in parallel. Hashed files are written
without the CRC-32 that `torch.save` computes otherwise: nothing reads it, and it costs as much as the writing to
memory.
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
    """The content is `bytes`, or what `write_files` turns into a tensor."""


def write_files(
    folder: Path, files: Sequence[FileToWrite], tensor_of: Callable[[Any], Tensor], *, hashed: bool = True
) -> dict[str, Any]:
    """Write files into a folder and flush them to disk.

    Args:
        tensor_of: a tensor on the CPU whose storage has no other values, from the content of a part that is not bytes.
        hashed: for measurements; False: without hashes.

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
    """Threads in which `torch.save` writes CRC-32 or not; its option is of a thread or of the process, as torch's
    release has it."""
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
    """As torch's FileSystemWriter: each tensor as `torch.save` writes it, one after the other."""
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
    """How much of a file is written."""

    def __init__(self) -> None:
        self._changed, self._bytes = threading.Condition(), 0.0

    def set(self, num_bytes: float) -> None:
        """That many bytes can be read; infinite: no more will be written."""
        with self._changed:
            self._bytes = num_bytes
            self._changed.notify_all()

    def wait_for(self, num_bytes: int) -> None:
        """Return when the file has that many bytes, or no more are written."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= num_bytes)


class _HashedFile:
    """A new file whose blocks are hashed by `pool` while they are written; None: they are not hashed."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor | None) -> None:
        self._path, self._pool = path, pool
        self._stream: IO[bytes] = path.open("wb", buffering=_BUFFER_BYTES)
        self._blocks: list[Future[str]] = []
        self._written, self._flushed = _Written(), 0
        self.size = 0
        """Bytes written."""
        self.error: OSError | None = None
        """Of a write."""

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
        """Let what is written be read, and begin to hash the blocks that contain it."""
        self._stream.flush()
        self._flushed = self.size
        self._written.set(self.size)
        if self._pool is not None:
            for index in range(len(self._blocks), -(-self.size // BLOCK_BYTES)):
                self._blocks.append(self._pool.submit(hash_block, self._path, index, self._written.wait_for))
