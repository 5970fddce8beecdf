"""Zig-zag split of a sequence over context-parallel ranks: of 2 * cp_size equal chunks, rank r holds chunks r and
2 * cp_size - 1 - r.

This order balances causal attention over the ranks. Megatron-Core's rotary embedding
(`models/common/embeddings/rope_utils.py`, `get_pos_emb_on_this_cp_rank`) and Transformer Engine expect it.
The functions are plain tensor operations on any device and need no process group.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_wrap.errors import LayoutError


def _check(seq_length: int, cp_size: int, cp_rank: int) -> None:
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise LayoutError(f"context-parallel rank {cp_rank} is not in a group of {cp_size}")
    if cp_size > 1 and seq_length % (2 * cp_size):
        raise LayoutError(
            f"a sequence of {seq_length} cannot be split into 2 x context_parallel_size = {2 * cp_size} equal chunks; "
            f"pad it to {-(-seq_length // (2 * cp_size)) * 2 * cp_size}"
        )


def chunks_of(cp_size: int, cp_rank: int) -> tuple[int, ...]:
    """Indices of a rank's chunks (of 2 * cp_size in the sequence), in its local order."""
    return (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)


def packed_positions(lengths: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Positions of one rank's tokens in a row of one or several sequences, each split over the ranks separately.

    Args:
        lengths: lengths of the sequences in the row, in tokens.

    Returns:
        int64 [sum(lengths) / cp_size], in the rank's local order: sequence by sequence.

    Raises:
        LayoutError: a length is not a multiple of 2 * cp_size.
    """
    for length in lengths:
        _check(length, cp_size, cp_rank)
    if cp_size == 1:
        return torch.arange(sum(lengths))
    chunk = np.repeat(np.asarray(lengths, dtype=np.int64) // (2 * cp_size), 2)  # length of each local chunk
    numbers = np.tile(np.asarray(chunks_of(cp_size, cp_rank), dtype=np.int64), len(lengths))
    starts = np.repeat(np.cumsum(lengths) - np.asarray(lengths, dtype=np.int64), 2) + numbers * chunk
    within = np.arange(chunk.sum()) - np.repeat(np.cumsum(chunk) - chunk, chunk)
    return torch.from_numpy(np.repeat(starts, chunk) + within)


def merge(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The whole tensor from the parts of all ranks; the inverse of a selection of `packed_positions`.

    Args:
        parts: one local tensor per context-parallel rank, in rank order, of equal length along `dim`.

    Raises:
        LayoutError: no parts, or parts of unequal or odd length.
    """
    lengths = sorted({part.shape[dim] for part in parts})
    if len(parts) == 1:
        return parts[0]
    if len(lengths) != 1 or lengths[0] % 2:
        raise LayoutError(f"{len(parts)} context-parallel parts of lengths {lengths} do not form one sequence")
    first, second = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
    return torch.cat([*first, *reversed(second)], dim=dim)


def sequence_divisor(tp_size: int, cp_size: int, sequence_parallel: bool, token_multiple: int = 1) -> int:
    """The divisor that the length of every sequence, in tokens, must have.

    Context parallelism splits a sequence into 2 * cp_size chunks; sequence parallelism splits each rank's share into
    tp_size parts. `token_multiple` must divide each context-parallel rank's share.
    """
    divisor = math.lcm(2 * cp_size if cp_size > 1 else 1, cp_size * token_multiple)
    return math.lcm(divisor, cp_size * tp_size) if sequence_parallel else divisor


def pad_to(tensor: Tensor, dim: int, length: int, value: float = 0) -> Tensor:
    """Pad a tensor with `value` at the end of `dim` to `length`; returns the tensor itself if it has that length.

    Raises:
        LayoutError: the tensor is longer than `length`.
    """
    missing = length - tensor.shape[dim]
    if missing < 0:
        raise LayoutError(f"a tensor of length {tensor.shape[dim]} along dimension {dim} cannot be padded to {length}")
    if missing == 0:
        return tensor
    later_dims = tensor.dim() - 1 - dim % tensor.dim()
    return functional.pad(tensor, [0, 0] * later_dims + [0, missing], value=value)
