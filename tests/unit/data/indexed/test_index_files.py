"""The files of `preprocess` and `merge` are those of Megatron-Core's own builder, and its reader reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_wrap.data.indexed.index_files import Documents, GrowingFiles, merge, read_part, token_dtype, write_pair
from megatron_wrap.errors import DataError
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder  # noqa: E402

Document = list[list[int]]
"""Its sequences."""


def documents(seed: int, count: int) -> list[Document]:
    random = np.random.default_rng(seed)
    return [
        [random.integers(0, 60000, random.integers(1, 9)).tolist() for _ in range(random.integers(1, 4))]
        for _ in range(count)
    ]


def by_megatron(prefix: Path, result: list[Document], dtype: type) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in result:
        tokens = [token for sequence in document for token in sequence]
        builder.add_document(tokens, [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")


def append(files: GrowingFiles, result: list[Document], dtype: type) -> None:
    tokens = np.array([token for document in result for sequence in document for token in sequence], dtype)
    lengths = np.array([len(sequence) for document in result for sequence in document], np.int32)
    files.append(Documents(tokens, lengths, np.array([len(document) for document in result], np.int64)))


def pair(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx")]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, np.uint16), (65500, np.int32)])
def test_the_files_are_those_of_megatron_cores_builder(tmp_path, vocab_size, dtype):
    """Also where what was written after the recorded position is cut off."""
    assert token_dtype(vocab_size) == dtype
    result = documents(1, 50)
    files = GrowingFiles(str(tmp_path / "ours"), np.dtype(dtype))
    append(files, result[:20], dtype)
    position = files.sync()
    append(files, result[:9], dtype)  # the process is killed here
    files.close()
    files = GrowingFiles(str(tmp_path / "ours"), np.dtype(dtype), position)
    append(files, result[20:], dtype)
    write_pair([files.close()], str(tmp_path / "ours"))
    by_megatron(tmp_path / "theirs", result, dtype)
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")
    read = IndexedDataset(str(tmp_path / "ours"))
    assert [read[index].tolist() for index in range(len(read))] == [part for document in result for part in document]


def test_merged_files_are_those_of_megatron_cores_builder(tmp_path):
    parts = [documents(2, 7), documents(3, 1), documents(4, 12)]
    for index, part in enumerate(parts):
        by_megatron(tmp_path / str(index), part, np.uint16)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for index in range(3):
        builder.add_index(str(tmp_path / str(index)))
    builder.finalize(str(tmp_path / "theirs.idx"))
    count, tokens = merge([str(tmp_path / str(index)) for index in range(3)], str(tmp_path / "ours"))
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")
    assert (count, tokens) == (20, (tmp_path / "ours.bin").stat().st_size // 2)


def damaged(prefix: Path, how: str) -> None:
    if how == "missing":
        Path(f"{prefix}.bin").unlink()
    elif how == "dtype":
        by_megatron(prefix, documents(5, 3), np.int32)
    else:
        path = Path(f"{prefix}.{how}")
        path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", ["2.bin", "no such file", "did you mean"]),
        ("bin", ["2.bin", "truncated"]),
        ("idx", ["2.idx", "truncated"]),
        ("dtype", ["2.idx", "int32", "1.idx", "uint16"]),
    ],
)
def test_a_damaged_prefix_is_refused(tmp_path, how, words):
    for name in ("1", "2"):
        by_megatron(tmp_path / name, documents(6, 3), np.uint16)
    damaged(tmp_path / "2", how)
    with pytest.raises(DataError) as raised:
        merge([str(tmp_path / "1"), str(tmp_path / "2")], str(tmp_path / "out"))
    for word in words:
        assert word in str(raised.value)
    assert not list(tmp_path.glob("out*"))


def test_nothing_is_overwritten(tmp_path):
    by_megatron(tmp_path / "1", documents(7, 3), np.uint16)
    with pytest.raises(DataError, match="is an input and the output"):
        merge([str(tmp_path / "1")], str(tmp_path / "1"))
    merge([str(tmp_path / "1")], str(tmp_path / "2"))
    with pytest.raises(DataError, match="exists already"):
        merge([str(tmp_path / "1")], str(tmp_path / "2"))
    assert read_part(str(tmp_path / "2")).tokens.endswith("2.bin")
