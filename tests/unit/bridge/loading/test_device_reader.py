"""Slices that threads read to a device are those of the file; here the device is the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_wrap.bridge.loading import device_reader
from megatron_wrap.bridge.loading.device_reader import DeviceReader
from megatron_wrap.bridge.loading.folder_tensors import file_tensors
from megatron_wrap.errors import CheckpointError

CPU = torch.device("cpu")
TENSORS = {
    "bf16": torch.arange(3 * 8 * 50).view(3, 8, 50).bfloat16(),
    "bytes": torch.arange(2 * 5 * 16, dtype=torch.uint8).view(2, 5, 16),
    "fp8": torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn),
    "fp32": torch.arange(7.0),
    "scalar": torch.tensor(2.5),
    "integers": torch.arange(4),
}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_reader, "_BUFFER_BYTES", 64)  # most slices need several
    monkeypatch.setattr(device_reader, "_LEAST_BYTES", 200)
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return file_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("bf16", (slice(0, 3), slice(0, 8), slice(0, 50))),
        ("bf16", (slice(1, 3), slice(0, 8), slice(0, 50))),
        ("bf16", (slice(2, 3), slice(3, 7), slice(0, 50))),
        ("bf16", (slice(0, 1), slice(7, 8), slice(10, 31))),
        ("bf16", (slice(1, 1), slice(0, 8), slice(0, 50))),
        ("bf16", (slice(0, 2), slice(0, 4), slice(0, 50))),
        ("bf16", (slice(1, 3), slice(5, 8), slice(0, 50))),
        ("bytes", (slice(1, 2), slice(2, 5), slice(0, 16))),
        ("fp8", (slice(1, 2), slice(1, 3))),
        ("fp32", (slice(2, 6),)),
        ("scalar", ()),
    ],
)
def test_slices_of_one_range_or_one_for_each_first_index_are_those_of_the_file(name, index, stored):
    values = DeviceReader(CPU).read(stored[name], index)
    assert values is not None
    expected = TENSORS[name][index]
    assert values.dtype == expected.dtype
    assert torch.equal(values.float(), expected.float())
    assert values.shape == expected.shape


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("bf16", (slice(0, 2), slice(0, 1), slice(0, 50))),
        ("bf16", (slice(0, 1), slice(0, 2), slice(0, 49))),
        ("bf16", (slice(0, 2), slice(0, 8), slice(0, 49))),
        ("integers", (slice(0, 2),)),
    ],
)
def test_other_slices_are_left_to_the_caller(name, index, stored):
    assert DeviceReader(CPU).read(stored[name], index) is None


def test_threads_read_at_the_same_time(stored):
    reader, rows = DeviceReader(CPU), [(expert, row) for expert in range(3) for row in range(8)] * 20

    def read(position):
        expert, row = position
        return reader.read(stored["bf16"], (slice(expert, expert + 1), slice(row, row + 1), slice(0, 50)))

    with ThreadPoolExecutor(4) as pool:
        for (expert, row), values in zip(rows, pool.map(read, rows), strict=True):
            assert torch.equal(values[0, 0], TENSORS["bf16"][expert, row])


def test_values_are_checked_at_the_end_and_the_tensor_is_named(stored):
    reader = DeviceReader(CPU)
    reader.check_later(stored["fp32"], torch.ones(3))
    reader.finish()
    for value in (torch.nan, -torch.inf):
        reader.check_later(stored["fp32"], torch.ones(3))
        reader.check_later(stored["bf16"], torch.tensor([1.0, value]))
        with pytest.raises(CheckpointError, match=r"model\.safetensors: bf16 contains NaN or infinity"):
            reader.finish()
        reader.finish()


def test_a_file_that_was_cut_is_one_error(stored):
    file = stored["scalar"].file
    last = max(stored.values(), key=lambda entry: entry.start)
    with file.open("r+b") as opened:
        opened.truncate(last.start + 1)
    with pytest.raises(CheckpointError, match="is shorter than its header says"):
        DeviceReader(CPU).read(last, tuple(slice(0, size) for size in last.shape))
