"""Comparison of tensor files with their hashes while they are read: threads hash blocks ahead of other threads, which
read the tensors in them ahead of their copies to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.hashes import BLOCK_BYTES, block_damage, buffer_of, hash_block
from megatron_wrap.errors import CheckpointError
from megatron_wrap.platform.megatron_core.checkpoint_reader import FilePart
from megatron_wrap.utils.pools.threads import map_ahead, threads_of_rank

Block = tuple[str, int]
"""File and number of the block."""
HASHERS = 8
"""Threads that hash, at most: enough to stay ahead of the reading. More of them slow it down, since both read memory
(docs/reliability.md)."""
HASHERS_OF_PROCESSOR = 2
"""Of these, for each processor of the rank, at most: one hashes while the other one waits for the disk."""
HASH_BYTES = 2 * 2**20
"""What each of them reads at once: it stays in the processor's cache, and the system reads more than this ahead, so
that the disk is busy while it is hashed."""
READERS = 4
"""Threads that read, at most; most of the time is the copy from the system's cache."""
AHEAD_BYTES = 512 * 2**20
"""Largest size of the tensors that are read ahead, in host memory; one alone may be larger."""


def _num_hashers() -> int:
    return min(HASHERS, HASHERS_OF_PROCESSOR * threads_of_rank(HASHERS))


class BlockVerification:
    """A context manager, whose end stops the threads.

    Args:
        folder: of the checkpoint.
        hashes: file -> its entry in the manifest; other files are not compared.
    """

    def __init__(self, folder: Path, hashes: Mapping[str, Any]) -> None:
        self._folder, self._hashes = folder, hashes
        self._pool = ThreadPoolExecutor(_num_hashers(), thread_name_prefix="verification")
        self._buffers: list[memoryview] = []
        self._values: dict[Block, Future[str]] = {}
        self.damage: str | None = None
        """The first block that differed or could not be read, as text."""

    def __enter__(self) -> BlockVerification:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, part: int, parts: int) -> None:
        """Begin to hash a part of the files before it is known which are read. A rank's own files are there, and the
        first reading waits less."""
        every = self._every_block()
        self._hash(every[len(every) * part // parts : len(every) * (part + 1) // parts])

    def ahead(self, parts: Sequence[FilePart], read: Callable[[FilePart], Any]) -> Iterator[tuple[FilePart, Any]]:
        """Each part and what `read` returned for it, in this order; threads call it when a part's blocks are compared.

        Raises:
            CheckpointError: a block differs, or cannot be read.
        """
        self._forget_waiting()
        for part in parts:
            self._hash(self._blocks(*part))

        def read_compared(part: FilePart) -> Any:
            self._require(*part)
            return read(part)

        threads = threads_of_rank(READERS)
        yield from map_ahead(read_compared, parts, threads, size_of=lambda part: part[2], most=AHEAD_BYTES)

    def compared(self) -> set[Block]:
        """The blocks that are compared here, or will be by `compare_rest`."""
        return set(self._values)

    def compare_rest(self, compared: set[Block], part: int, parts: int) -> None:
        """Compare the blocks that are hashed here and were not read, and of those that no process hashed every
        `parts`-th from this one; set `damage`.

        Args:
            compared: by any process.
        """
        self._hash([block for block in self._every_block() if block not in compared][part::parts])
        for block, value in self._values.items():
            self._compare(block, value)

    def _hash(self, blocks: Sequence[Block]) -> None:
        """Begin to hash these blocks, in this order, after those that were begun before."""
        for name, index in blocks:
            if (name, index) not in self._values:
                self._values[name, index] = self._pool.submit(self._hash_block, name, index)

    def _hash_block(self, name: str, index: int) -> str:
        """In the buffer of an earlier block, if there is one: pages of new memory cost as much as the reading."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = buffer_of(min(HASH_BYTES, BLOCK_BYTES))
        try:
            return hash_block(self._folder / name, index, buffer=buffer)
        finally:
            self._buffers.append(buffer)

    def _forget_waiting(self) -> None:
        """Leave blocks that no thread hashes yet, so that others come first."""
        self._values = {block: value for block, value in self._values.items() if not value.cancel()}

    def _require(self, name: str, offset: int, length: int) -> None:
        """Wait until the blocks of a part are compared, and raise if one differs."""
        for block in self._blocks(name, offset, length):
            self._compare(block, self._values[block])
            if self.damage is not None:
                raise CheckpointError(self.damage)

    def _compare(self, block: Block, value: Future[str]) -> None:
        """Wait for the hash of a block, and set `damage` if it is another one."""
        name, index = block
        try:
            if value.result() != self._hashes[name]["blocks"][index]:
                self.damage = self.damage or block_damage(name, index)
        except OSError as error:
            self.damage = self.damage or f"{name} cannot be read ({error})"

    def _every_block(self) -> list[Block]:
        return [(name, index) for name, entry in self._hashes.items() for index in range(len(entry["blocks"]))]

    def _blocks(self, name: str, offset: int, length: int) -> list[Block]:
        if name not in self._hashes or length == 0:
            return []
        last = min((offset + length - 1) // BLOCK_BYTES, len(self._hashes[name]["blocks"]) - 1)
        return [(name, index) for index in range(offset // BLOCK_BYTES, last + 1)]
