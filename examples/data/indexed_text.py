"""Writes tokenized documents as Megatron's PREFIX.bin and PREFIX.idx, without Megatron-Core."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy

UINT16 = 8
"""Code of the type in Megatron-Core's `DType` (megatron/core/datasets/indexed_dataset.py)."""


def write_indexed(prefix: Path, documents: Sequence[Sequence[int]]) -> None:
    """Token ids below 65536, concatenated by document, and the index of their lengths."""
    lengths = numpy.array([len(document) for document in documents], dtype="<i4")
    pointers = (numpy.cumsum(lengths, dtype="<i8") - lengths) * 2
    ends = numpy.arange(len(documents) + 1, dtype="<i8")
    numpy.concatenate([numpy.array(document, dtype="<u2") for document in documents]).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, UINT16, len(documents), len(ends)))
        file.write(lengths.tobytes() + pointers.tobytes() + ends.tobytes())
