"""Comparison of tensor files with their hashes while they are read: a thread reads and hashes each block once, and the
tensors in it are taken from that memory."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_wrap.checkpoint.files.hashed_files import BLOCK_BYTES, block_damage, read_block
from megatron_wrap.errors import CheckpointError
from megatron_wrap.platform.megatron_core.checkpoint_reader import FilePart, ReadPart
from megatron_wrap.platform.megatron_core.torch_save_format import BytesInMemory
from megatron_wrap.utils.pools.threads import map_ahead, threads_of_rank

Block = tuple[str, int]
"""Name of the file and index of the block in it."""

HASHERS = 8
"""Largest number of threads that read and hash blocks (docs/reliability.md)."""

HASHERS_OF_PROCESSOR = 2
"""Largest number of these threads for each processor of the rank: one hashes while another waits for the disk."""

HASH_BYTES = 2 * 2**20
"""Bytes that each thread reads at once. They fit into the processor's cache, and the system reads ahead more than this,
so that the disk is busy during the hashing."""

HELD_BESIDE = 2
"""Number of blocks in memory besides one per thread, from which tensors are read. More blocks save no time, since new
memory pages cost as much."""

READERS = 4
"""Largest number of threads that read tensors from this memory or, without hashes, from files. The copy takes most of
the time."""

AHEAD_BYTES = 512 * 2**20
"""Largest total size in bytes of tensors that are read ahead into host memory; a single tensor may be larger."""


class BlockVerification:
    """Reads, hashes and compares the blocks of a checkpoint; a context manager, whose end stops the threads.

    Host memory: ten blocks with eight threads, more while a tensor is larger.

    Args:
        folder: of the checkpoint.
        hashes: file -> its entry in the manifest; other files are not compared.
        device: of most tensors.
    """

    def __init__(self, folder: Path, hashes: Mapping[str, Any], device: torch.device) -> None:
        self._folder, self._hashes = folder, hashes
        threads = min(HASHERS, HASHERS_OF_PROCESSOR * threads_of_rank(HASHERS))
        self._most_held = threads + HELD_BESIDE
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="verification")
        self._memory = BlockMemory(self._block_bytes(), device)
        self._held: dict[Block, Future[_HeldBlock]] = {}
        """Block -> its reading, for blocks that are in memory or will be."""
        self._released: dict[Block, Future[_HeldBlock]] = {}
        """Block -> its reading, for blocks whose memory is reused although they are not compared yet."""
        self.damage: str | None = None
        """The first block that differs or cannot be read, as text; None if there is none."""

    def __enter__(self) -> BlockVerification:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._memory.close()

    def begin(self, part: int, parts: int) -> None:
        """Begin to read a part of the blocks, as many as fit into memory, before it is known which ones the rank needs.
        They are mostly from the files that the rank wrote, so that the first tensors are ready earlier."""
        every = self._every_block()
        for block in every[len(every) * part // parts : len(every) * (part + 1) // parts][: self._most_held]:
            self._begin(block)

    def ahead(self, parts: Sequence[FilePart], read: ReadPart) -> Iterator[tuple[FilePart, Any]]:
        """Each part with the result of `read` for it, in the order of `parts`. Threads call `read` with the memory of a
        part's blocks once these are compared; the memory is valid until the next part is requested.

        Raises:
            CheckpointError: a block differs, or cannot be read.
        """
        blocks = [self._blocks(*part) for part in parts]
        last_use = {block: number for number, needed in enumerate(blocks) for block in needed}
        self._make_room(list(last_use)[: self._most_held])
        waiting = deque(block for block in last_use if block not in self._held)  # in the order of their first use

        def parts_begun() -> Iterator[FilePart]:
            for part, needed in zip(parts, blocks, strict=True):
                while not all(block in self._held for block in needed):
                    self._begin(waiting.popleft())
                yield part

        def read_compared(part: FilePart) -> Any:
            return read(part, self._compared_bytes(*part))

        self._begin_more(waiting)
        threads = threads_of_rank(READERS)
        results = map_ahead(read_compared, parts_begun(), threads, size_of=lambda part: part[2], most=AHEAD_BYTES)
        for number, result in enumerate(results):
            yield result
            for block in blocks[number]:
                if last_use[block] == number:
                    self._release(block)
            self._begin_more(waiting)

    def compared(self) -> set[Block]:
        """The blocks that are compared here, or will be by `compare_rest`."""
        return {*self._held, *self._released}

    def compare_rest(self, compared: set[Block], part: int, parts: int) -> None:
        """Compare the blocks that this process holds, and every `parts`-th, from number `part` on, of those that no
        process compared; set `damage`.

        Args:
            compared: blocks that any process compared.
        """
        rest = [block for block in self._every_block() if block not in compared][part::parts]
        hashed = {block: self._pool.submit(self._hash, *block) for block in rest}
        for block, value in {**self._released, **self._held, **hashed}.items():
            self._compare(block, value)

    def _begin(self, block: Block) -> None:
        if block not in self._held:
            self._held[block] = self._pool.submit(self._read, *block)

    def _begin_more(self, waiting: deque[Block]) -> None:
        while waiting and len(self._held) < self._most_held:
            self._begin(waiting.popleft())

    def _make_room(self, first: Sequence[Block]) -> None:
        """Release blocks in memory, so that the `first` blocks fit. Other blocks stay if there is room, for the next
        reading: if ranks share the reading, Megatron-Core reads objects, then tensors."""
        others = [block for block in self._held if block not in set(first)]
        for block in others[self._most_held - len(first) :]:
            self._release(block)

    def _release(self, block: Block) -> None:
        """Return the memory of a block, once its reading ends; a block that no thread reads yet will not be read."""
        held = self._held.pop(block)
        if not held.cancel():
            self._released[block] = held
            held.add_done_callback(self._give_back)

    def _give_back(self, read: Future[_HeldBlock]) -> None:
        if read.exception() is None:
            self._memory.give_back(read.result().memory)

    def _read(self, name: str, index: int) -> _HeldBlock:
        memory = self._memory.take()
        try:
            return _HeldBlock(memory, *read_block(self._folder / name, index, memory, HASH_BYTES))
        except BaseException:
            self._memory.give_back(memory)
            raise

    def _hash(self, name: str, index: int) -> _HeldBlock:
        """Read and hash a block whose content is not needed."""
        read = self._read(name, index)
        self._memory.give_back(read.memory)
        return read

    def _compared_bytes(self, name: str, offset: int, length: int) -> BytesInMemory | None:
        """Wait until the blocks of a part are compared, and raise if one differs; None if the file has no hashes."""
        if name not in self._hashes:
            return None
        pieces = []
        for block in self._blocks(name, offset, length):
            self._compare(block, self._held[block])
            if self.damage is not None:
                raise CheckpointError(self.damage)
            held, begin = self._held[block].result(), block[1] * BLOCK_BYTES
            content = np.frombuffer(held.memory, np.uint8)[: held.num_bytes]
            pieces.append(content[max(0, offset - begin) : offset + length - begin])
        return BytesInMemory(pieces)

    def _compare(self, block: Block, read: Future[_HeldBlock]) -> None:
        """Wait for the hash of a block, and set `damage` if it differs."""
        name, index = block
        try:
            if read.result().value != self._hashes[name]["blocks"][index]:
                self.damage = self.damage or block_damage(name, index)
        except OSError as error:
            self.damage = self.damage or f"{name} cannot be read ({error})"

    def _block_bytes(self) -> int:
        """Size of the memory for a block in bytes: less than `BLOCK_BYTES` if all files are smaller."""
        sizes = [1]
        for name in self._hashes:
            with contextlib.suppress(OSError):  # a block of it cannot be read, either
                sizes.append((self._folder / name).stat().st_size)
        return min(BLOCK_BYTES, max(sizes))

    def _every_block(self) -> list[Block]:
        return [(name, index) for name, entry in self._hashes.items() for index in range(len(entry["blocks"]))]

    def _blocks(self, name: str, offset: int, length: int) -> list[Block]:
        if name not in self._hashes or length == 0:
            return []
        last = min((offset + length - 1) // BLOCK_BYTES, len(self._hashes[name]["blocks"]) - 1)
        return [(name, index) for index in range(offset // BLOCK_BYTES, last + 1)]


@dataclass(frozen=True)
class _HeldBlock:
    """A block in memory."""

    memory: memoryview
    value: str
    """SHA-256 of the block, hexadecimal."""
    num_bytes: int


class BlockMemory:
    """Buffers of the same size, for use from any thread.

    New memory pages cost as much time as the reading, so memory is reused, and has large pages where the system permits
    them.

    Args:
        num_bytes: the size of a buffer.
        device: if it is a GPU, the memory is page-locked, so that the device copies from it without the processor.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self._free: list[memoryview] = []
        self._locked: list[int] = []
        """Addresses of page-locked memory."""

    def take(self) -> memoryview:
        """A buffer that is not in use, with arbitrary content."""
        try:
            return self._free.pop()
        except IndexError:
            return self._allocate()

    def give_back(self, memory: memoryview) -> None:
        """Return memory that is no longer used."""
        self._free.append(memory)

    def close(self) -> None:
        """Release all memory, none of which may be in use."""
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._locked.clear()
        self._free.clear()

    def _allocate(self) -> memoryview:
        pages = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a system without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        if self._device.type == "cuda":
            self._lock(torch.frombuffer(pages, dtype=torch.uint8).data_ptr())
        return memoryview(pages)

    def _lock(self, address: int) -> None:
        """Page-lock memory. If that fails, copies are slower, but correct."""
        with torch.cuda.device(self._device):  # the one of this thread is GPU 0
            if int(torch.cuda.cudart().cudaHostRegister(address, self._num_bytes, 0)) == 0:
                self._locked.append(address)
                return
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error until it is asked for
                torch.zeros(1, device=self._device)
