"""Writes .bin and .idx files for tests with Megatron-Core's own writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
import torch

EOD = 2
VOCAB = 64


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: type = numpy.uint16) -> str:
    """PREFIX.bin and PREFIX.idx of these documents; returns the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(list(document), dtype=torch.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_documents(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    """Documents of unequal lengths that end with EOD."""
    generator = numpy.random.default_rng(seed)
    lengths = generator.integers(3, longest, count)
    return [[*generator.integers(3, VOCAB, int(length)).tolist(), EOD] for length in lengths]
