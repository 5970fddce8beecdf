"""The files of Megatron's indexed data, PREFIX.bin with tokens and PREFIX.idx with the length of each document: their
header and their sizes, validated before Megatron-Core maps them into memory.

The form of PREFIX.idx is that of Megatron-Core's `_IndexWriter` (megatron/core/datasets/indexed_dataset.py): 9 bytes of
magic, version (uint64), type of the tokens (uint8), number of sequences and number of document ends (uint64 each), then
the length (int32) and the byte offset (int64) of each sequence, and the document ends (int64), little-endian.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_wrap.errors import DataError, missing_path_hint

MAGIC = b"MMIDIDX\x00\x00"
"""First bytes of PREFIX.idx."""
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, sequences, document ends."""
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Code of a type -> NumPy's name (`DType` of Megatron-Core)."""
_ENDINGS = (".bin", ".idx")


@dataclass(frozen=True)
class IndexFile:
    """A prefix whose two files fit together."""

    prefix: str
    dtype: str
    """Type of the tokens in PREFIX.bin."""
    lengths: np.ndarray
    """int32 [documents], tokens of each; mapped from the file."""

    @property
    def documents(self) -> int:
        """Number of documents; empty ones count."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.lengths.sum(dtype=np.int64))

    def part(self, begin: float, end: float) -> tuple[int, int]:
        """(documents, tokens) of the part from `begin` to `end`, shares of the documents in their order, rounded as
        Megatron-Core's `_build_megatron_dataset_splits` does (blended_megatron_dataset_builder.py)."""
        first, last = round(begin * float(self.documents)), round(end * float(self.documents))
        return last - first, int(self.lengths[first:last].sum(dtype=np.int64))


def some_document_ends_with(index: IndexFile, token: int) -> bool:
    """Whether one of the first hundred documents with tokens ends with this one."""
    ends = np.cumsum(index.lengths[:10_000], dtype=np.int64)[index.lengths[:10_000] > 0][:100] - 1
    tokens = np.memmap(f"{index.prefix}.bin", dtype=index.dtype, mode="r")
    return bool((tokens[ends] == token).any())


def first_tokens(index: IndexFile) -> np.ndarray:
    """The first 65,536 tokens."""
    return np.fromfile(f"{index.prefix}.bin", dtype=index.dtype, count=65_536)


def read_index(prefix: str) -> IndexFile:
    """Read the header of PREFIX.idx, and compare the sizes of both files with it. `~` is the home folder.

    Raises:
        DataError: a file is missing, is of another format, was truncated, or has tokens of another type than its index.
    """
    prefix = os.path.expanduser(prefix)
    for ending in _ENDINGS:
        if not os.path.isfile(prefix + ending):
            hint = missing_path_hint(prefix + ending)
            if prefix.endswith(_ENDINGS):
                hint = f"; give the prefix {prefix[:-4]}, without {prefix[-4:]}"
            raise DataError(f"{prefix}{ending}: no such file{hint}; megatron-wrap preprocess writes both files")
    path = Path(prefix + ".idx")
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[:9] != MAGIC:
        raise DataError(f"{path}: not an index of Megatron: it begins with {header[:9]!r}, not {MAGIC!r}; rebuild it")
    _, version, code, sequences, ends = HEADER.unpack(header)
    if version != 1 or code not in TYPES:
        raise DataError(f"{path}: version {version} and token type {code} are not known; rebuild it")
    expected, size = HEADER.size + sequences * 12 + ends * 8, path.stat().st_size
    if size < expected:
        raise DataError(
            f"{path}: {size} bytes, but {sequences} documents need {expected}: it was truncated; copy or rebuild it"
        )
    if sequences == 0:
        raise DataError(f"{path}: no documents; rebuild it from files with text")
    lengths = np.memmap(path, dtype="<i4", mode="r", offset=HEADER.size, shape=(sequences,))
    index = IndexFile(prefix, TYPES[code], lengths)
    _check_tokens(index)
    return index


def _check_tokens(index: IndexFile) -> None:
    """Compare PREFIX.bin with the index."""
    path, tokens = f"{index.prefix}.bin", index.tokens
    if tokens == 0:
        raise DataError(
            f"{index.prefix}.idx: all {index.documents} documents are empty; rebuild it from files with text"
        )
    if int(index.lengths.min()) < 0:
        raise DataError(f"{index.prefix}.idx: a document has a negative length; rebuild it")
    if index.dtype.startswith("float"):
        raise DataError(f"{index.prefix}.idx: token ids are {index.dtype}; they must be integers: rebuild it")
    width, size = np.dtype(index.dtype).itemsize, os.stat(path).st_size
    if size == tokens * width:
        return
    if size % tokens == 0 and size // tokens in (1, 2, 4, 8):
        raise DataError(
            f"{path}: {size // tokens} bytes for each of {tokens} tokens, but {index.prefix}.idx has the type "
            f"{index.dtype} of {width}: the index is of another file; rebuild both"
        )
    reason = "it was truncated" if size < tokens * width else "it is of another index"
    raise DataError(
        f"{path}: {size} bytes, but {index.prefix}.idx has {tokens} tokens of {width} bytes, {tokens * width} in all: "
        f"{reason}; copy or rebuild both files"
    )
