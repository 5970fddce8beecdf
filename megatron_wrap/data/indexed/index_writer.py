"""Writes Megatron-LM's pair of files, PREFIX.bin and PREFIX.idx, without an index in memory, and merges such pairs.

`index_files.py` describes and reads the format.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from megatron_wrap.data.indexed.index_files import HEADER, MAGIC, TYPES, check_content, mapped, read_index
from megatron_wrap.errors import DataError
from megatron_wrap.utils.atomic_write import atomic_file, named_write_errors

_UINT16_VOCABULARY = 65500
"""Vocabulary size from which on Megatron-Core writes four bytes for each token, and two below."""
_CHUNK = 1 << 20
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
                        shutil.copyfileobj(source, target, 16 * _CHUNK)
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
        for begin in range(0, len(part.lengths), _CHUNK):
            ends = offset + np.cumsum(part.lengths[begin : begin + _CHUNK].astype("<i8") * part.dtype.itemsize)
            np.concatenate(([offset], ends[:-1])).astype("<i8").tofile(file)
            offset = int(ends[-1])
    file.write(struct.pack("<q", 0))
    before = 0
    for part in parts:
        for begin in range(0, len(part.ends), _CHUNK):
            (part.ends[begin : begin + _CHUNK] + before).astype("<i8").tofile(file)
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
