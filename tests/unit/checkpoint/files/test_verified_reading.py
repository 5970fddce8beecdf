"""Tensor files are compared with their hashes before a part of them is read, from the memory that was compared; nothing
of a damaged block is read."""

from pathlib import Path

import pytest
import torch

from megatron_wrap.checkpoint.files import hashed_files, verified_reading
from megatron_wrap.checkpoint.files.verified_reading import BlockMemory, BlockVerification
from megatron_wrap.errors import CheckpointError

CPU = torch.device("cpu")
BLOCK, SIZE = 64, 1000
FILES = ("__0_0.distcp", "__0_1.distcp")
UNKNOWN = "common.pt"
"""Not in the manifest of these tests: read, and compared with nothing."""
PARTS = [(name, offset, 50) for name in (*FILES, UNKNOWN) for offset in range(0, SIZE, 50)]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder with files of many blocks, and their hashes."""
    for module in (hashed_files, verified_reading):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    for seed, name in enumerate((*FILES, UNKNOWN), 1):
        (tmp_path / name).write_bytes(bytes(seed * number % 251 for number in range(SIZE)))
    return tmp_path, hashed_files.hash_files(tmp_path, FILES)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """File and number of each block that is read."""
    read: list[tuple[str, int]] = []

    def read_block(path: Path, index: int, *further):
        read.append((path.name, index))
        return hashed_files.read_block(path, index, *further)

    monkeypatch.setattr(verified_reading, "read_block", read_block)
    return read


@pytest.mark.parametrize("processors", [1, 8])
def test_parts_come_in_order_and_a_damaged_one_is_not_read(processors, saved, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    folder, expected = saved
    read: list[tuple[str, int, int]] = []

    def content(part, memory):
        read.append(part)
        name, offset, length = part
        assert (memory is None) == (name == UNKNOWN)
        return (folder / name).read_bytes()[offset : offset + length] if memory is None else memory.read()

    with BlockVerification(folder, expected, CPU) as compared:
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
    with BlockVerification(folder, expected, CPU) as compared, pytest.raises(CheckpointError, match=FILES[1]):
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
    with BlockVerification(folder, expected, CPU) as compared:
        compared.compare_rest(set(), rank, 2)
        last = len(expected[FILES[0]]["blocks"]) - 1
        assert (compared.damage is not None) == (last % 2 == rank)


def test_a_block_that_was_begun_early_and_not_read_is_compared(saved):
    folder, expected = saved
    (folder / FILES[0]).unlink()
    with BlockVerification(folder, expected, CPU) as compared:
        compared.begin(0, 1)
        everywhere = compared.compared()
        assert (FILES[0], 0) in everywhere
        compared.compare_rest(everywhere, 0, 1)
        assert compared.damage is not None
        assert "cannot be read" in compared.damage


@pytest.mark.parametrize("length", [10, 50, 900])
def test_a_file_is_read_once_and_memory_is_used_again(length, saved, blocks, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    allocated: list[int] = []
    allocate = BlockMemory._allocate

    def counted(memory: BlockMemory):
        allocated.append(memory._num_bytes)
        return allocate(memory)

    monkeypatch.setattr(BlockMemory, "_allocate", counted)
    folder, expected = saved
    parts = [(name, offset, length) for name in FILES for offset in range(0, SIZE - length + 1, length)]
    with BlockVerification(folder, expected, CPU) as compared:
        compared.begin(0, 1)
        for part, slices in compared.ahead(parts, lambda part, memory: memory.slices(0, part[2])):
            name, offset, _ = part
            content = b"".join(piece.tobytes() for piece in slices)  # before the next part is asked for
            assert content == (folder / name).read_bytes()[offset : offset + length]
        compared.compare_rest(compared.compared(), 0, 1)
    assert compared.damage is None
    assert len(blocks) == len(set(blocks)) == 2 * -(-SIZE // BLOCK)
    in_part = -(-length // BLOCK) + 1
    assert len(allocated) <= max(2 + verified_reading.HELD_BESIDE, 2 * in_part)
    assert set(allocated) == {BLOCK}


def test_blocks_that_were_begun_early_and_come_late_are_read_again(saved, monkeypatch):
    """Otherwise they would hold the memory for which the first ones wait."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    folder, expected = saved
    parts = [(FILES[0], offset, 50) for offset in range(0, SIZE, 50)]
    with BlockVerification(folder, expected, CPU) as compared:
        compared.begin(1, 4)  # the second half of the first file
        received = [memory for _, memory in compared.ahead(parts, lambda _, memory: memory.read())]
        compared.compare_rest(compared.compared(), 0, 1)
    assert b"".join(received) == (folder / FILES[0]).read_bytes()
    assert compared.damage is None


def test_blocks_that_were_begun_early_stay_for_a_later_reading(saved, blocks, monkeypatch):
    """Where ranks share the reading, the few objects are read before the tensors."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    folder, expected = saved
    objects, tensors = [(FILES[1], 0, 10)], [(FILES[0], 0, 100), (FILES[0], 100, 90)]
    with BlockVerification(folder, expected, CPU) as compared:
        compared.begin(0, 1)
        for parts in (objects, tensors):
            received = [memory for _, memory in compared.ahead(parts, lambda _, memory: memory.read())]
    assert b"".join(received) == (folder / FILES[0]).read_bytes()[:190]
    assert {(FILES[0], 0), (FILES[0], 1), (FILES[0], 2), (FILES[1], 0)} <= set(blocks)
    assert len(blocks) == len(set(blocks))


def test_bytes_after_the_last_block_are_not_read(tmp_path, monkeypatch):
    for module in (hashed_files, verified_reading):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    file = tmp_path / FILES[0]
    file.write_bytes(bytes(2 * BLOCK))
    expected = hashed_files.hash_files(tmp_path, [FILES[0]])
    file.write_bytes(bytes(2 * BLOCK) + b"appended")
    with BlockVerification(tmp_path, expected, CPU) as compared:
        [(_, content)] = compared.ahead([(FILES[0], 2 * BLOCK - 4, 12)], lambda _, memory: memory.read())
    assert content == bytes(4)
