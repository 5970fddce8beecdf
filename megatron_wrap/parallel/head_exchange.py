"""All-to-all between a rank's share of each sequence with all heads, and whole sequences with a share of the heads,
as in DeepSpeed Ulysses (arXiv:2309.14509). This module imports Megatron-Core, so call `Platform.install` first."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from megatron_wrap.parallel.zigzag import packed_positions


def to_whole_sequences(tensor: Tensor, lengths: tuple[int, ...], group: Any) -> Tensor:
    """Exchange [s / cp, b, heads, d] in this rank's zig-zag order for [s, b, heads / cp, d] in the order of the row.

    Args:
        lengths: global lengths of the sequences in a row; multiples of 2 * cp.
        group: process group of the context-parallel ranks.
    """
    size = group.size()
    shares = tensor.unflatten(2, (size, -1)).movedim(2, 0)
    received = all_to_all(group, shares.contiguous()).flatten(0, 1)
    _, from_ranks = _order(lengths, size, tensor.device)
    return received.index_select(0, from_ranks)


def to_whole_heads(tensor: Tensor, lengths: tuple[int, ...], group: Any) -> Tensor:
    """The inverse of `to_whole_sequences`."""
    size = group.size()
    by_rank, _ = _order(lengths, size, tensor.device)
    received = all_to_all(group, tensor.index_select(0, by_rank).unflatten(0, (size, -1)).contiguous())
    return received.movedim(0, 2).flatten(2, 3)


def attention_inputs_by_heads(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`to_whole_sequences` of the inputs of attention, in one all-to-all. With fewer key heads than ranks, each head is
    sent to all ranks that have its queries.

    Args:
        query: [s / cp, b, heads, d]; cp divides the heads.
        key: [s / cp, b, groups, d]; cp divides the groups, or the groups divide cp.
        value: [s / cp, b, groups, d_v].
        lengths, group: as in `to_whole_sequences`.

    Returns:
        [s, b, heads / cp, d], and keys and values [s, b, max(groups / cp, 1), d or d_v].
    """
    size = group.size()
    copies = max(1, size // key.shape[2])
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
    tensors = (query, key, value)
    shares = [tensor.unflatten(2, (size, -1)).flatten(3) for tensor in tensors]  # [s / cp, b, cp, share of a rank]
    whole = to_whole_sequences(torch.cat(shares, dim=3), lengths, group)
    parts = whole.squeeze(2).split([share.shape[3] for share in shares], dim=-1)
    first, second, third = (
        part.unflatten(2, (-1, tensor.shape[3])) for part, tensor in zip(parts, tensors, strict=True)
    )
    return first, second, third


@functools.lru_cache(maxsize=16)
def _order(lengths: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions in the row of the concatenated shares of all ranks, and the inverse permutation."""
    positions = torch.cat([packed_positions(lengths, size, rank) for rank in range(size)])
    return positions.to(device), positions.argsort().to(device)
