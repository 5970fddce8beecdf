"""Consecutive sequences of a row, moved apart so that an operation over neighbors does not cross a border.

Plain tensor operations on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class PackedRow(Protocol):
    """Attributes of `nn.packed_sequences.PackedSequences` that linear attention reads; the sequences cover a row with b
    = 1."""

    lengths: tuple[int, ...]
    """Length of each sequence in tokens, on the host; global, not of a context-parallel rank."""
    cu_seqlens_q: Tensor
    """Cumulative lengths of the sequences, int32 [N + 1]."""


@dataclass(frozen=True)
class SpacedRows:
    """Rows of sequences with free positions before or after each sequence."""

    length: int
    """Number of positions of a row, free ones included."""
    positions: Tensor
    """Position of each token, int64 [tokens]."""
    starts: tuple[int, ...]
    """The first position of each sequence, free ones included."""

    def spread(self, tensor: Tensor) -> Tensor:
        """Insert free positions: [b, tokens, ...] -> [b, length, ...], 0 at free positions; the tensor itself if there
        are none."""
        if self.length == len(self.positions):
            return tensor
        rows = tensor.new_zeros(tensor.shape[0], self.length, *tensor.shape[2:])
        return rows.index_copy(1, self.positions, tensor)

    def collect(self, rows: Tensor) -> Tensor:
        """The inverse of `spread`."""
        if self.length == len(self.positions):
            return rows
        return rows.index_select(1, self.positions)


@functools.lru_cache(maxsize=64)
def spaced_rows(lengths: tuple[int, ...], before: int, multiple: int, device: torch.device) -> SpacedRows:
    """Rows in which `before` free positions precede each sequence, and others follow it up to a multiple of `multiple`.

    Args:
        lengths: lengths of the sequences of a row, in tokens.
    """
    counts = np.asarray(lengths, dtype=np.int64)
    taken = before + -(-counts // multiple) * multiple
    starts = np.cumsum(taken) - taken
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = torch.from_numpy(np.repeat(starts + before, counts) + within).to(device)
    return SpacedRows(int(taken.sum()), positions, tuple(starts.tolist()))


def check_lengths(tokens: int, lengths: Sequence[int]) -> None:
    """Raise ValueError if sequences do not cover the tokens of a row."""
    if sum(lengths) != tokens:
        raise ValueError(f"sequences of {sum(lengths)} tokens in all do not cover a row of {tokens}")
