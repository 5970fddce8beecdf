"""Tensor files are compared with their hashes before a part of them is read; nothing of a damaged block is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wrap.checkpoint.files import hashes, verification
from megatron_wrap.checkpoint.files.verification import BlockVerification
from megatron_wrap.errors import CheckpointError

BLOCK, SIZE = 64, 1000
FILES = ("__0_0.distcp", "__0_1.distcp")
UNKNOWN = "common.pt"
"""Not in the manifest of these tests: read, and compared with nothing."""
PARTS = [(name, offset, 50) for name in (*FILES, UNKNOWN) for offset in range(0, SIZE, 50)]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with files of many blocks, and their hashes."""
    for module in (hashes, verification):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    for seed, name in enumerate((*FILES, UNKNOWN), 1):
        (tmp_path / name).write_bytes(bytes(seed * number % 251 for number in range(SIZE)))
    return tmp_path, hashes.hash_files(tmp_path, FILES)


@pytest.mark.parametrize("processors", [1, 8])
def test_parts_come_in_order_and_a_damaged_one_is_not_read(processors, saved, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    folder, expected = saved
    read: list[tuple[str, int, int]] = []

    def content(part):
        read.append(part)
        name, offset, length = part
        return (folder / name).read_bytes()[offset : offset + length]

    with BlockVerification(folder, expected) as compared:
        compared.begin(1, 2)
        received = list(compared.ahead(PARTS, content))
        compared.compare_rest(compared.compared(), 0, 1)
    assert compared.damage is None
    assert [part for part, _ in received] == PARTS
    assert b"".join(data for _, data in received) == b"".join(
        (folder / name).read_bytes() for name in (*FILES, UNKNOWN)
    )

    position = 7 * BLOCK + 3
    damaged = bytearray((folder / FILES[1]).read_bytes())
    damaged[position] ^= 4
    (folder / FILES[1]).write_bytes(damaged)
    read.clear()
    with BlockVerification(folder, expected) as compared, pytest.raises(CheckpointError, match=FILES[1]):
        list(compared.ahead(PARTS, content))
    assert compared.damage is not None
    assert f"from byte {7 * BLOCK}" in compared.damage
    in_block = [part for part in PARTS if part[0] == FILES[1] and part[1] < 8 * BLOCK and part[1] + 50 > 7 * BLOCK]
    assert in_block
    assert not set(in_block) & set(read)


@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_that_no_rank_reads_are_compared_by_one_of_them(rank, saved):
    folder, expected = saved
    (folder / FILES[0]).write_bytes((folder / FILES[0]).read_bytes()[:-1])  # one byte of the last block is missing
    with BlockVerification(folder, expected) as compared:
        compared.compare_rest(set(), rank, 2)
        last = len(expected[FILES[0]]["blocks"]) - 1
        assert (compared.damage is not None) == (last % 2 == rank)


def test_a_block_that_was_begun_early_and_not_read_is_compared(saved):
    folder, expected = saved
    (folder / FILES[0]).unlink()
    with BlockVerification(folder, expected) as compared:
        compared.begin(0, 1)
        everywhere = compared.compared()
        assert (FILES[0], 0) in everywhere
        compared.compare_rest(everywhere, 0, 1)
        assert compared.damage is not None
        assert "cannot be read" in compared.damage
