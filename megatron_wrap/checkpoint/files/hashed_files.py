"""SHA-256 of a checkpoint's files, by blocks, and writing of tensor files that are hashed while they are written.

The manifest holds, for every other file, the hash of each block of 64 MiB and the hash of the list of these hashes, and
under `digest` the hash of its own content.

Tensor files are written in threads, where torch serializes a tensor into a stream. Another thread follows the writing
and computes the SHA-256 of a block from the operating system's cache of the file. The writing does not wait for it: a
block that is not hashed in time is finished while the next one is written, so that blocks of one file are hashed in
parallel. Hashed files are written without the CRC-32 that `torch.save` otherwise computes: nothing reads it, and it
costs as much time as writing to memory. Hashing needs neither torch nor Megatron-Core.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_wrap.utils.pools.threads import threads_of_rank

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_BYTES = 64 * 2**20

PIECE_BYTES = 4 * 2**20
"""Number of bytes that are read at once to be hashed."""

_MAX_THREADS = 8

_FEW_BYTES = 2**20
"""Total size in bytes of files that are hashed before threads have started."""

_BUFFER_BYTES = 2**20

Index = tuple[str, tuple[int, ...] | None, int | None]
"""Name, offset and number of a part of a tensor, or of an object: torch's MetadataIndex."""


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Hashes of files, computed in parallel over their blocks.

    Returns:
        Name -> `blocks`, the hash of each block, and `list`, the hash of these hashes, all hexadecimal.

    Raises:
        OSError: a file cannot be read.
    """
    counts = {name: -(-(folder / name).stat().st_size // BLOCK_BYTES) for name in names}
    hashes = iter(_hash_blocks(folder, [(name, index) for name, count in counts.items() for index in range(count)]))
    blocks = {name: [next(hashes) for _ in range(count)] for name, count in counts.items()}
    return {name: entry_of(values) for name, values in blocks.items()}


def entry_of(blocks: list[str]) -> dict[str, Any]:
    """The manifest entry of a file whose blocks have these hashes."""
    return {"blocks": blocks, "list": _hash_list(blocks)}


def hash_threads() -> int:
    """Number of threads of this process that hash."""
    return threads_of_rank(_MAX_THREADS)


def find_damage(folder: Path, hashes: Mapping[str, Any], part: int = 0, parts: int = 1) -> str | None:
    """The first block that differs from its hash, as text; None if there is none.

    Args:
        hashes: from `hash_files`.
        part: only every `parts`-th block, from this one, is read.
    """
    blocks = [(name, index) for name, entry in hashes.items() for index in range(len(entry["blocks"]))][part::parts]
    try:
        values = _hash_blocks(folder, blocks)
    except OSError as error:
        return f"cannot be read ({error})"
    for (name, index), value in zip(blocks, values, strict=True):
        if value != hashes[name]["blocks"][index]:
            return block_damage(name, index)
    return None


def block_damage(name: str, index: int) -> str:
    """A sentence about a block that differs."""
    return f"{name} differs from its SHA-256 in the {BLOCK_BYTES >> 20} MiB from byte {index * BLOCK_BYTES}"


def digest(manifest: Mapping[str, Any]) -> str:
    """Hash of a manifest's content without its `digest`."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def manifest_damage(manifest: Mapping[str, Any]) -> str | None:
    """The difference between a manifest and what was written, as text; None if there is none."""
    if manifest.get("digest") != digest(manifest):
        return "differs from its SHA-256"
    lists = all(entry["list"] == _hash_list(entry["blocks"]) for entry in manifest["hashes"].values())
    return None if lists else "contains a list of hashes that differs from its SHA-256"


def _hash_blocks(folder: Path, blocks: list[tuple[str, int]]) -> list[str]:
    threads = min(hash_threads(), len(blocks))
    if threads > 1 and sum((folder / name).stat().st_size for name in {name for name, _ in blocks}) > _FEW_BYTES:
        with ThreadPoolExecutor(threads) as pool, contextlib.suppress(RuntimeError):  # a program that ends has no pools
            return list(pool.map(lambda block: hash_block(folder / block[0], block[1]), blocks))
    return [hash_block(folder / name, index) for name, index in blocks]


def hash_block(path: Path, index: int, wait_for: Callable[[int], object] | None = None) -> str:
    """SHA-256 of a block of a file, hexadecimal.

    Args:
        wait_for: for a file that is still being written: waits until the file has a number of bytes or is complete.
    """
    # a bytearray would be filled with zeros while other threads wait for Python's lock
    result, piece = hashlib.sha256(), memoryview(mmap.mmap(-1, PIECE_BYTES))
    position, last = index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES
    with path.open("rb", buffering=0) as stream:
        stream.seek(position)
        while position < last:
            end = min(position - position % len(piece) + len(piece), last)
            if wait_for is not None:
                wait_for(end)
            size = stream.readinto(piece[: end - position])
            if not size:
                break
            result.update(piece[:size])
            position += size
    return result.hexdigest()


def read_block(path: Path, index: int, memory: memoryview, piece_bytes: int) -> tuple[str, int]:
    """Read a block of a file into memory, and hash each piece right after it was read, while it is in the processor's
    cache.

    Returns:
        SHA-256, hexadecimal, and the number of bytes: fewer than those of `memory` at the end of the file.
    """
    result, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as stream:
        stream.seek(index * BLOCK_BYTES)
        while size < len(memory):
            count = stream.readinto(memory[size : size - size % piece_bytes + piece_bytes])
            if not count:
                break
            result.update(memory[size : size + count])
            size += count
    return result.hexdigest(), size


def _hash_list(hashes: list[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


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
