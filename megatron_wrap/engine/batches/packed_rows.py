"""Packing: all sequences of a micro-batch in one row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch


def padded_length(length: int, multiple: int) -> int:
    """Tokens of a sequence in a row: at least one, rounded up to a multiple of `multiple`."""
    return -(-max(1, length) // multiple) * multiple


def pack(micro_batch: MicroBatch, pad_to_multiple_of: int) -> MicroBatch:
    """Concatenate the sequences [B, S] of a micro-batch to one row [1, T]. Fields without a sequence dimension stay as
    collated, one entry for each sequence or sample.

    Args:
        pad_to_multiple_of: tokens to a multiple of which each sequence is padded: 2 * cp_size with context parallelism,
            which splits each sequence into so many chunks; else 1.
    """
    lengths = micro_batch.lengths.numpy()
    segments = np.array([padded_length(length, pad_to_multiple_of) for length in lengths])
    rows = np.repeat(np.arange(len(segments)), segments)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(segments) - segments, segments)
    is_padding = torch.from_numpy(columns >= lengths[rows])
    indices = (torch.from_numpy(rows), torch.from_numpy(np.minimum(columns, micro_batch.width - 1)))

    def packed(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            name: one_row(tensor, micro_batch.seqdims[name], micro_batch.pad_values.get(name, 0))
            if tensor is not None and name in micro_batch.seqdims
            else tensor
            for name, tensor in fields.items()
        }

    def one_row(tensor: Tensor, dim: int, pad_value: float) -> Tensor:
        tokens = tensor.movedim(dim, 1)[indices]
        tokens[is_padding] = pad_value
        return tokens[None].movedim(1, dim)

    return replace(
        micro_batch,
        model_inputs=packed(micro_batch.model_inputs),
        loss_inputs=packed(micro_batch.loss_inputs),
        width=len(rows),
        segments=tuple(segments.tolist()),
    )


def filled_row(segments: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The lengths of a row's sequences, followed by those of sequences of padding that fill the row up to `width`, none
    longer than the longest sequence of the row."""
    missing, longest = width - sum(segments), max(segments)
    rest = (missing % longest,) if missing % longest else ()
    return (*segments, *(longest,) * (missing // longest), *rest)
