"""Writing of a rank's tensor files, in threads, each file hashed while it is written.

torch serializes a tensor into a stream, so a block's SHA-256 is computed by another thread as soon as the stream has
written it, from the operating system's cache of the file: blocks of one file are hashed in parallel, and the writing
does not wait for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_wrap.checkpoint.files.hashes import BLOCK_BYTES, entry_of, hash_block, hash_threads

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
    with ThreadPoolExecutor(hash_threads()) as hashing, ThreadPoolExecutor(len(files)) as writing:

        def write(file: FileToWrite) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            with _HashedFile(folder / file.name, hashing if hashed else None) as stream:
                parts = [_write_part(stream, file.name, index, content, tensor_of) for index, content in file.parts]
                return parts, stream.finish()

        written = list(writing.map(write, files))
    hashes = {file.name: entry for file, (_, entry) in zip(files, written, strict=True) if hashed}
    return {"parts": [part for parts, _ in written for part in parts], "hashes": hashes}


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
        if stream.error is not None:  # torch raises its own error, which does not tell that the disk is full
            raise stream.error from None
        raise


class _HashedFile:
    """A new file whose blocks are hashed by `pool` once they are written; None: they are not hashed."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor | None) -> None:
        self._path, self._pool = path, pool
        self._stream: IO[bytes] = path.open("wb", buffering=_BUFFER_BYTES)
        self._blocks: list[Future[str]] = []
        self.size = 0
        """Bytes written."""
        self.error: OSError | None = None
        """Of a write."""

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, data: bytes) -> int:
        try:
            written = self._stream.write(data)
            self.size += written
            if self.size // BLOCK_BYTES > len(self._blocks):
                self._stream.flush()
                self._hash_to(self.size // BLOCK_BYTES)
        except OSError as error:
            self.error = error
            raise
        return written

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> dict[str, Any]:
        """Flush the file to disk; returns its entry in the manifest."""
        self._stream.flush()
        self._hash_to(-(-self.size // BLOCK_BYTES))
        os.fsync(self._stream.fileno())
        return entry_of([block.result() for block in self._blocks])

    def _hash_to(self, count: int) -> None:
        if self._pool is not None:
            self._blocks += [self._pool.submit(hash_block, self._path, at) for at in range(len(self._blocks), count)]
