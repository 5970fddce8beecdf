"""The files of Megatron's indexed data, PREFIX.bin with tokens and PREFIX.idx with the length of each document: their
header, sizes and content, validated before Megatron-Core maps them into memory; written document by document, and
merged.

The form of PREFIX.idx is that of Megatron-Core's `_IndexWriter` (megatron/core/datasets/indexed_dataset.py): 9 bytes of
magic, version (uint64), type of the tokens (uint8), number of sequences and number of document ends (uint64 each), then
the length (int32) and the byte offset (int64) of each sequence, the document ends (int64), little-endian, and in
multimodal data the mode (int8) of each sequence. The sequences are in the order of their tokens, without gaps."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from megatron_wrap.errors import DataError
from megatron_wrap.nearest_names import missing_path_hint
from megatron_wrap.utils.atomic_write import atomic_file, named_write_errors

MAGIC = b"MMIDIDX\x00\x00"
"""First bytes of PREFIX.idx."""
HEADER = struct.Struct("<9sQBQQ")
"""Format of the header of PREFIX.idx: magic, version, code of the token type, number of sequences, number of document
ends."""
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Code of a type -> NumPy's name (`DType` of Megatron-Core)."""
_ENDINGS = (".bin", ".idx")
_CHUNK = 1 << 16
"""Number of values that are compared at a time; as int64 they fit into a core's cache."""


@dataclass(frozen=True)
class IndexFile:
    """A prefix whose two files fit together."""

    prefix: str
    dtype: str
    """Type of the tokens in PREFIX.bin."""
    lengths: np.ndarray
    """Tokens of each document, int32 [documents]; mapped from the file."""
    offsets: np.ndarray
    """Byte of PREFIX.bin at which each document begins, int64 [documents]; mapped from the file."""
    ends: np.ndarray
    """Number of sequences up to the end of each document, after a first 0, int64; mapped from the file."""
    modes: np.ndarray
    """Mode of each document, int8 [documents], 0 for text; mapped from the file, empty without modes."""

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
    """Read the header of PREFIX.idx, and compare the sizes of both files with it; see `check_content` for the rest.
    `~` is the home folder.

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
    if size not in (expected, expected + sequences):
        reason = "it was truncated" if size < expected else "it is damaged"
        raise DataError(
            f"{path}: {size} bytes, but {sequences} documents need {expected}: {reason}; copy or rebuild it"
        )
    if sequences == 0:
        raise DataError(f"{path}: no documents; rebuild it from files with text")
    columns, offset = [], HEADER.size
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", ends), ("<i1", size - expected)):
        columns.append(mapped(path, dtype, offset, count))
        offset += columns[-1].nbytes
    index = IndexFile(prefix, TYPES[code], *columns)
    _check_tokens(index)
    return index


def check_content(index: IndexFile) -> None:
    """Read the whole PREFIX.idx, 20 bytes of each document, and compare the offsets with the lengths and the document
    ends with the number of sequences.

    Raises:
        DataError: the sequences are not consecutive, the document ends do not ascend from 0 to the number of sequences,
            or a sequence is not text.
    """
    path, width, offset = f"{index.prefix}.idx", np.dtype(index.dtype).itemsize, 0
    rebuild = "it is damaged, or its columns are of different files; rebuild it"
    for begin in range(0, index.documents, _CHUNK):
        sizes = np.multiply(index.lengths[begin : begin + _CHUNK], width, dtype=np.int64)
        following = offset + np.cumsum(sizes)
        offsets, expected = index.offsets[begin : begin + _CHUNK], following - sizes
        if not np.array_equal(offsets, expected):
            wrong = int(np.argmax(offsets != expected))
            raise DataError(
                f"{path}: sequence {begin + wrong + 1} begins at byte {offsets[wrong]} of {index.prefix}.bin, but the "
                f"lengths of those before it sum to {expected[wrong]}: {rebuild}"
            )
        offset = int(following[-1])
    if len(index.ends) == 0 or index.ends[0] != 0 or index.ends[-1] != index.documents:
        between = f"from {index.ends[0]} to {index.ends[-1]}" if len(index.ends) else "missing"
        raise DataError(f"{path}: the document ends are {between}, not from 0 to {index.documents}: {rebuild}")
    for begin in range(0, len(index.ends), _CHUNK):
        steps = np.diff(index.ends[begin : begin + _CHUNK + 1])
        if (steps < 0).any():
            wrong = begin + int(np.argmax(steps < 0))
            raise DataError(
                f"{path}: document {wrong + 1} ends at sequence {index.ends[wrong + 1]}, before its beginning "
                f"{index.ends[wrong]}: {rebuild}"
            )
    if index.modes.any():
        wrong = int(np.argmax(index.modes != 0))
        raise DataError(
            f"{path}: sequence {wrong + 1} has the mode {index.modes[wrong]}, so its tokens are not text; give an "
            "index of text alone"
        )


def mapped(path: str | Path, dtype: str, offset: int, count: int) -> np.ndarray:
    """An array of a file, memory-mapped; an empty file can be mapped, too."""
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)


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


_UINT16_VOCABULARY = 65500
"""Vocabulary size from which on Megatron-Core writes four bytes for each token, and two below."""
_WRITE_BLOCK = 1 << 20
_UNFINISHED = ".unfinished"


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of stored tokens: uint16 for a vocabulary below 65,500, else int32."""
    return np.dtype("uint16" if vocab_size < _UINT16_VOCABULARY else "int32")


class Documents(NamedTuple):
    """Consecutive documents."""

    tokens: np.ndarray
    """Tokens of all documents, concatenated."""
    lengths: np.ndarray
    """Tokens of each sequence, int32."""
    sequences: np.ndarray
    """Number of sequences of each document, int64."""


@dataclass(frozen=True)
class Part:
    """Tokens and borders of one pair of files, memory-mapped.

    Attributes:
        tokens: file of the tokens.
        lengths: tokens of each sequence.
        ends: the number of sequences up to the end of each document.
    """

    tokens: str
    dtype: np.dtype
    lengths: np.ndarray
    ends: np.ndarray


def read_part(prefix: str) -> Part:
    """The pair of files PREFIX.bin and PREFIX.idx, with sizes and content that agree.

    Raises:
        DataError: see `read_index` and `check_content`.
    """
    index = read_index(prefix)
    check_content(index)
    return Part(index.prefix + ".bin", np.dtype(index.dtype), index.lengths, index.ends[1:])


def merge(prefixes: Sequence[str], output_prefix: str) -> tuple[int, int]:
    """Concatenate the documents of several pairs of files into one pair.

    The bytes are those of Megatron-LM's merge_datasets.py. The files appear under their names when they are complete.

    Returns:
        The numbers of documents and of tokens.

    Raises:
        DataError: a pair is missing or damaged, has tokens of another dtype than the first, or is the output itself.
    """
    output = os.path.abspath(os.path.expanduser(output_prefix))
    parts = [read_part(prefix) for prefix in prefixes]
    for prefix, part in zip(prefixes, parts, strict=True):
        if part.dtype != parts[0].dtype:
            raise DataError(
                f"{prefix}.idx: has tokens of dtype {part.dtype}, and {prefixes[0]}.idx of {parts[0].dtype}; merge "
                "only files of one tokenizer"
            )
        if os.path.abspath(os.path.expanduser(prefix)) == output:
            raise DataError(f"{prefix}: is an input and the output; give another --output-prefix")
    for path in (output + ".bin", output + ".idx"):
        if os.path.exists(path):
            raise DataError(f"{path}: exists already; delete it, or give another --output-prefix")
    os.makedirs(os.path.dirname(output), exist_ok=True)
    write_pair(parts, output)
    documents = sum(len(part.ends) for part in parts)
    return documents, sum(int(part.lengths.sum(dtype=np.int64)) for part in parts)


def write_pair(parts: Sequence[Part], prefix: str) -> None:
    """Write PREFIX.bin and PREFIX.idx with the documents of `parts`. Files that exist under these names are replaced.

    The file of a single part whose name ends in `.unfinished` is renamed, not copied.
    """
    renamed = len(parts) == 1 and parts[0].tokens.endswith(_UNFINISHED)
    with atomic_file(prefix + ".idx") as index:
        _write_index(parts, index)
        if not renamed:
            with atomic_file(prefix + ".bin") as target:
                for part in parts:
                    with open(part.tokens, "rb") as source:
                        shutil.copyfileobj(source, target, 16 * _WRITE_BLOCK)
    if renamed:  # last: until then, the growing files are complete and a stopped run can finish them
        os.replace(parts[0].tokens, prefix + ".bin")


def _write_index(parts: Sequence[Part], file: IO[bytes]) -> None:
    sequences, documents = sum(len(part.lengths) for part in parts), sum(len(part.ends) for part in parts)
    code = next(code for code, name in TYPES.items() if name == parts[0].dtype.name)
    file.write(HEADER.pack(MAGIC, 1, code, sequences, documents + 1))
    for part in parts:
        part.lengths.astype("<i4", copy=False).tofile(file)
    offset = 0
    for part in parts:
        for begin in range(0, len(part.lengths), _WRITE_BLOCK):
            ends = offset + np.cumsum(part.lengths[begin : begin + _WRITE_BLOCK].astype("<i8") * part.dtype.itemsize)
            np.concatenate(([offset], ends[:-1])).astype("<i8").tofile(file)
            offset = int(ends[-1])
    file.write(struct.pack("<q", 0))
    before = 0
    for part in parts:
        for begin in range(0, len(part.ends), _WRITE_BLOCK):
            (part.ends[begin : begin + _WRITE_BLOCK] + before).astype("<i8").tofile(file)
        before += len(part.lengths)


class GrowingFiles:
    """A pair of files to which documents are appended: tokens, lengths and ends, in files beside the final ones.

    Args:
        prefix: of the final files; those of this object are PREFIX.bin.unfinished and the like.
        dtype: of the tokens.
        position: bytes of the three files to keep, from `sync`; the rest is cut off. (0, 0, 0) for a new pair.

    Raises:
        DataError: a file is shorter than `position`, or cannot be written.
    """

    def __init__(self, prefix: str, dtype: np.dtype, position: Sequence[int] = (0, 0, 0)) -> None:
        self._dtype = dtype
        self._paths = _unfinished_paths(prefix)
        with named_write_errors(f"{prefix}.bin", "choose another --output-prefix", DataError):
            self._files = [open(path, "ab") for path in self._paths]  # noqa: SIM115 - closed by `close`
        for path, file, kept in zip(self._paths, self._files, position, strict=True):
            if file.seek(0, os.SEEK_END) < kept:
                raise DataError(
                    f"{path}: has fewer than the {kept:,} bytes that were written; delete it and start again"
                )
            file.truncate(kept)
            file.seek(kept)
        self._sequences = position[1] // 4

    def append(self, documents: Documents) -> None:
        """Append documents, with tokens of the dtype of the files."""
        tokens, lengths, sequences = documents
        assert tokens.dtype == self._dtype
        ends = self._sequences + np.cumsum(sequences, dtype="<i8")
        columns = (tokens.astype(tokens.dtype.newbyteorder("<"), copy=False), lengths.astype("<i4"), ends.astype("<i8"))
        for file, column in zip(self._files, columns, strict=True):
            file.write(column.data)
        self._sequences += len(lengths)

    def sync(self) -> tuple[int, int, int]:
        """Flush everything to disk; returns the sizes of the three files in bytes, for `position`."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        tokens, lengths, ends = (file.tell() for file in self._files)
        return tokens, lengths, ends

    def close(self) -> Part:
        """Close the files; returns them as a part."""
        for file in self._files:
            file.close()
        tokens, lengths, ends = self._paths
        counts = os.path.getsize(lengths) // 4, os.path.getsize(ends) // 8
        return Part(tokens, self._dtype, mapped(lengths, "<i4", 0, counts[0]), mapped(ends, "<i8", 0, counts[1]))


def delete_unfinished(prefix: str) -> None:
    """Remove the files of `GrowingFiles` of a prefix."""
    for path in _unfinished_paths(prefix):
        Path(path).unlink(missing_ok=True)


def _unfinished_paths(prefix: str) -> list[str]:
    return [f"{prefix}.{name}{_UNFINISHED}" for name in ("bin", "lengths", "ends")]
