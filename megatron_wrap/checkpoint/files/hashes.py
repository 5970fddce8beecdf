"""SHA-256 of a checkpoint's files, by blocks. Needs neither torch nor Megatron-Core.

The manifest holds, for every other file, the hash of each block of 64 MiB and the hash of the list of these hashes, and
under `digest` the hash of its own content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_wrap.utils.pools.threads import threads_of_rank

BLOCK_BYTES = 64 * 2**20
PIECE_BYTES = 4 * 2**20
"""Number of bytes that are read at once to be hashed."""
_MAX_THREADS = 8
_FEW_BYTES = 2**20
"""Total size in bytes of files that are hashed before threads have started."""


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
