"""Comparison of tensor files with their hashes while they are read: blocks are hashed by threads ahead of the reading,
which waits only for those of the tensor that it reads next."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.hashes import BLOCK_BYTES, block_damage, hash_block, hash_threads
from megatron_wrap.errors import CheckpointError

Block = tuple[str, int]
"""File and number of the block."""


class BlockVerification:
    """A context manager, whose end stops the threads.

    Args:
        folder: of the checkpoint.
        hashes: file -> its entry in the manifest; other files are not compared.
    """

    def __init__(self, folder: Path, hashes: Mapping[str, Any]) -> None:
        self._folder, self._hashes = folder, hashes
        self._pool = ThreadPoolExecutor(hash_threads(), thread_name_prefix="verification")
        self._values: dict[Block, Future[str]] = {}
        self._lock = threading.Lock()
        self.damage: str | None = None
        """The first block that differed or could not be read, as text."""

    def __enter__(self) -> BlockVerification:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """Begin to hash the blocks of parts, (file, offset, length) in bytes, in this order."""
        for name, offset, length in parts:
            for block in self._blocks(name, offset, length):
                with self._lock:
                    if block not in self._values:
                        self._values[block] = self._pool.submit(hash_block, self._folder / name, block[1])

    def require(self, name: str, offset: int, length: int) -> None:
        """Wait until the blocks of a part are compared.

        Raises:
            CheckpointError: one differs, or cannot be read.
        """
        self.begin([(name, offset, length)])
        for block in self._blocks(name, offset, length):
            self._compare(block, self._values[block])
            if self.damage is not None:
                raise CheckpointError(self.damage)

    def compared(self) -> set[Block]:
        """The blocks that were required, or will be."""
        return set(self._values)

    def compare_rest(self, compared: set[Block], part: int, parts: int) -> None:
        """Compare the other blocks, only every `parts`-th from this one, and set `damage`.

        Args:
            compared: by any process.
        """
        every = [(name, index) for name, entry in self._hashes.items() for index in range(len(entry["blocks"]))]
        rest = [block for block in every if block not in compared][part::parts]
        values = [self._pool.submit(hash_block, self._folder / name, index) for name, index in rest]
        for block, value in zip(rest, values, strict=True):
            self._compare(block, value)

    def _compare(self, block: Block, value: Future[str]) -> None:
        """Wait for the hash of a block, and set `damage` if it is another one."""
        name, index = block
        try:
            if value.result() != self._hashes[name]["blocks"][index]:
                self.damage = self.damage or block_damage(name, index)
        except OSError as error:
            self.damage = self.damage or f"{name} cannot be read ({error})"

    def _blocks(self, name: str, offset: int, length: int) -> list[Block]:
        if name not in self._hashes or length == 0:
            return []
        last = min((offset + length - 1) // BLOCK_BYTES, len(self._hashes[name]["blocks"]) - 1)
        return [(name, index) for index in range(offset // BLOCK_BYTES, last + 1)]
