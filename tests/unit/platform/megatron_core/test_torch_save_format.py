"""Tensors that torch.save wrote are read into existing memory as torch.load reads them, or left to torch.load; from a
file, and from bytes that lie in several arrays."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_wrap.platform.megatron_core.torch_save_format import _DTYPES, BytesInMemory, elements_of, read_into

BEFORE = b"another tensor"
"""Of the same file."""


def read(folder: Path, content: bytes, target: torch.Tensor, after: bytes = b"after") -> bool:
    file = folder / "__0_0.distcp"
    file.write_bytes(BEFORE + content + after)
    copies = [torch.empty_like(target).copy_(target) for _ in range(2)]
    with file.open("rb") as opened:
        was_read = read_into(target, _create_file_view(opened, len(BEFORE), len(content)))
    assert read_into(copies[0], in_memory(content)) == was_read
    elements = elements_of(copies[1], in_memory(content))
    assert (elements is not None) == was_read
    if elements is not None:
        elements.copy_to(copies[1])
    for copy in copies:
        torch.testing.assert_close(copy, target, rtol=0, atol=0)
    return was_read


def in_memory(content: bytes, piece: int = 71) -> BytesInMemory:
    values = np.frombuffer(content, np.uint8)
    return BytesInMemory([values[first : first + piece].copy() for first in range(0, len(content), piece)])


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def values(dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, size).to(dtype)


@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda dtype: values(dtype, 5, 4),
        lambda dtype: values(dtype, 5, 4)[2:],
        lambda dtype: values(dtype, 6)[4],
        lambda dtype: values(dtype, 3, 1, 2).transpose(0, 1),  # also in row-major order
    ],
    ids=["whole", "rows", "number", "transposed"],
)
def test_tensors_in_row_major_order(view: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype, tmp_path: Path):
    tensor = view(dtype)
    target = torch.zeros(tensor.size(), dtype=dtype)
    assert read(tmp_path, saved(tensor), target)
    torch.testing.assert_close(target, torch.load(io.BytesIO(saved(tensor)), weights_only=True), rtol=0, atol=0)


OTHER = {
    "columns": torch.ones(2, 3).T,
    "part": torch.ones(3, 3)[:, :2],
    "expanded": torch.ones(1, 2).expand(3, 2),
    "shape": torch.ones(2, 3),
    "float64": torch.ones(3, 2, dtype=torch.float64),
    "int32": torch.ones(3, 2, dtype=torch.int32),
    "float8": torch.ones(3, 2).to(torch.float8_e4m3fn),
    "imaginary": torch.ones(3, 2, dtype=torch.complex64),
    "negated": torch._neg_view(torch.ones(3, 2)),
    "parameter": torch.nn.Parameter(torch.ones(3, 2)),
    "list": [torch.ones(3, 2)],
    "object": {"weight": 1},
}


@pytest.mark.parametrize("name", OTHER)
def test_other_content_is_left_to_torch(name: str, tmp_path: Path):
    target = torch.full((3, 2), 7.0)
    assert not read(tmp_path, saved(OTHER[name]), target)
    assert target.eq(7).all()


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def test_damaged_and_hostile_files_are_left_to_torch(tmp_path: Path):
    content, target = saved(torch.ones(3, 2)), torch.full((3, 2), 7.0)
    assert not read(tmp_path, b"", target)
    assert not read(tmp_path, content[:-60], target)
    assert not read(tmp_path, content[100:], target)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in records if name.endswith("data.pkl"))
    few = records[pickled].replace(b"K\x06tq", b"K\x05tq", 1)  # the storage has five elements
    assert few != records[pickled]
    marker = tmp_path / "marker"
    for changed in (few, pickle.dumps(Call(Path.touch, marker)), b"garbage", pickle.dumps(torch.float32)):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name, record in records.items():
                archive.writestr(name, changed if name == pickled else record)
        assert not read(tmp_path, stream.getvalue(), target)
    assert not marker.exists()
    assert target.eq(7).all()


def test_a_file_that_ends_early_is_not_read():
    content = saved(torch.ones(300, 200))

    class Short(io.BytesIO):
        """Has its beginning and its end, where the archive is described."""

        def readinto(self, buffer: Any) -> int:
            return 0 if len(buffer) > 10_000 else super().readinto(buffer)

    assert not read_into(torch.zeros(300, 200), Short(content))


def test_bytes_in_memory_are_a_stream_like_those_of_a_file():
    content = bytes(range(256)) * 3
    stream, expected = in_memory(content), io.BytesIO(content)
    for step in (lambda opened: opened.read(7), lambda opened: opened.seek(-9, 2), lambda opened: opened.read(100)):
        assert step(stream) == step(expected)
        assert stream.tell() == expected.tell()
    for step in (lambda opened: opened.seek(60), lambda opened: opened.seek(5, 1), lambda opened: opened.read()):
        assert step(stream) == step(expected)
    assert b"".join(part.tobytes() for part in stream.slices(70, 200)) == content[70:270]
    assert b"".join(part.tobytes() for part in stream.slices(760, 200)) == content[760:]
