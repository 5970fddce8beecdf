"""Boundaries of the sequences in a packed row, in the forms that rotary embeddings and attention kernels take.

Megatron-Core passes a `PackedSequences` unchanged to the core attention of every layer. Its `qkv_format` is not `thd`,
so that Megatron-Core applies rotary embeddings to the row as to one sequence; `rotary_by_position` gives them the
positions within each sequence, without a loop over sequences and without synchronization with the device.
Megatron-Core's own path for `thd` has both unless its fused kernel is used. This module imports Megatron-Core, so call
`Platform.install` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_wrap.parallel.zigzag import chunks_of, packed_positions


@dataclass
class Half:
    """One of the two chunks that a context-parallel rank has of every sequence: queries, and the keys they attend."""

    queries: Tensor
    """Indices of the queries in the rank's row, int64 [t_local / 2]."""
    keys: Tensor
    """Indices of the keys in the concatenated rows of all ranks, int64."""
    cu_seqlens_q: Tensor
    """Cumulative numbers of queries, int32 [N + 1]."""
    cu_seqlens_k: Tensor
    """Cumulative numbers of keys, int32 [N + 1]; the last query of a sequence has the position of its last key."""
    longest_q: int
    longest_k: int

    def moved(self, move: Callable[[Tensor], Tensor]) -> Half:
        """A copy with `move` applied to each tensor."""
        return replace(
            self,
            queries=move(self.queries),
            keys=move(self.keys),
            cu_seqlens_q=move(self.cu_seqlens_q),
            cu_seqlens_k=move(self.cu_seqlens_k),
        )


@dataclass
class Boundaries:
    """Boundaries of the sequences in concatenated queries and in concatenated keys. Queries attend to the keys of the
    sequence with the same index."""

    queries: tuple[int, ...]
    """Number of queries of each sequence, on the host."""
    keys: tuple[int, ...]
    cu_seqlens_q: Tensor
    """Cumulative numbers of queries, int32 [N + 1]."""
    cu_seqlens_k: Tensor

    @classmethod
    def of(cls, queries: Any, keys: Any) -> Boundaries:
        """Boundaries from arrays of the sequences' numbers of queries and of keys."""
        return cls(tuple(queries.tolist()), tuple(keys.tolist()), _cumulative(queries), _cumulative(keys))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Boundaries:
        """A copy with `move` applied to each tensor."""
        return replace(self, cu_seqlens_q=move(self.cu_seqlens_q), cu_seqlens_k=move(self.cu_seqlens_k))


@dataclass
class RingBoundaries:
    """Boundaries of a context-parallel rank's queries and the keys of the same or another rank
    (`nn/attention/ring.py`)."""

    same_rank: Boundaries
    """A rank's queries and its own keys, which have the same positions."""
    earlier: Boundaries
    """All queries of a sequence and its first chunk of keys, then no queries and its second chunk."""
    later: Boundaries
    """Queries of a sequence's second chunk, and all its keys."""

    @classmethod
    def of(cls, chunk: Any) -> RingBoundaries:
        """Boundaries from an array of the lengths of the sequences' chunks."""
        local = 2 * chunk
        queries = np.stack((local, np.zeros_like(local)), axis=1).reshape(-1)
        return cls(Boundaries.of(local, local), Boundaries.of(queries, chunk.repeat(2)), Boundaries.of(chunk, local))

    def moved(self, move: Callable[[Tensor], Tensor]) -> RingBoundaries:
        """A copy with `move` applied to each tensor."""
        return RingBoundaries(self.same_rank.moved(move), self.earlier.moved(move), self.later.moved(move))


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Global lengths of the sequences in a row and what follows from them for one context-parallel rank. Padding at a
    sequence's end belongs to the sequence, padding at the row's end forms separate sequences: all tokens are covered,
    and `cu_seqlens_q` has the padded lengths."""

    lengths: tuple[int, ...]
    """Length of each sequence in tokens, on the host."""
    positions: Tensor
    """Position of each of the rank's tokens in its sequence, int64 [t_local]."""
    halves: tuple[Half, ...] = ()
    """The first and the second chunks of all sequences, for attention over context-parallel ranks; empty without
    context parallelism."""
    order: Tensor | None = None
    """Indices that put the concatenated queries of both halves into the rank's local order, int64 [t_local]; None
    without context parallelism."""
    ring: RingBoundaries | None = None
    """Boundaries for attention with keys that pass around a ring of ranks; None without context parallelism."""

    @classmethod
    def of(cls, lengths: Sequence[int], cp_size: int, cp_rank: int) -> PackedSequences:
        """The boundaries on the CPU.

        Args:
            lengths: global length of each sequence, multiples of 2 * cp_size if cp_size > 1.
        """
        # numpy: torch would start its threads for arrays of this size
        counts = np.asarray(lengths, dtype=np.int64)
        starts = np.cumsum(counts) - counts
        in_sequence = np.arange(counts.sum()) - np.repeat(starts, counts)
        indices = packed_positions(lengths, cp_size, cp_rank).numpy()
        halves, order = _halves(counts, starts, cp_size, cp_rank) if cp_size > 1 else ((), None)
        cu_seqlens, longest = _cumulative(counts), int(counts.max())
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
            positions=torch.from_numpy(in_sequence[indices]),
            halves=halves,
            order=order,
            ring=RingBoundaries.of(counts // (2 * cp_size)) if cp_size > 1 else None,
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedSequences:
        """A copy with `move` applied to each tensor."""
        cu_seqlens = move(self.cu_seqlens_q)
        changes: dict[str, Any] = {
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), cu_seqlens),
            "positions": move(self.positions),
            "halves": tuple(half.moved(move) for half in self.halves),
            "order": None if self.order is None else move(self.order),
            "ring": None if self.ring is None else self.ring.moved(move),
        }
        return replace(self, **changes)

    def thd(self) -> PackedSeqParams:
        """These boundaries in the form for Transformer Engine's attention on tensors [t, heads, d]."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_kv=self.cu_seqlens_kv,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_kv=self.max_seqlen_kv,
        )


def _halves(counts: Any, starts: Any, cp_size: int, cp_rank: int) -> tuple[tuple[Half, ...], Tensor]:
    # indices[r * t_local + j]: index in the whole row of token j of rank r; gathered: the inverse
    indices = np.concatenate([packed_positions(counts.tolist(), cp_size, rank).numpy() for rank in range(cp_size)])
    gathered = np.empty_like(indices)
    gathered[indices] = np.arange(len(indices))
    chunk = counts // (2 * cp_size)
    halves, queries = [], []
    for half, number in enumerate(chunks_of(cp_size, cp_rank)):
        reach = chunk * (number + 1)
        queries.append(_ranges(starts // cp_size + half * chunk, chunk))
        halves.append(
            Half(
                queries=torch.from_numpy(queries[-1]),
                keys=torch.from_numpy(gathered[_ranges(starts, reach)]),
                cu_seqlens_q=_cumulative(chunk),
                cu_seqlens_k=_cumulative(reach),
                longest_q=int(chunk.max()),
                longest_k=int(reach.max()),
            )
        )
    both = np.concatenate(queries)
    order = np.empty_like(both)
    order[both] = np.arange(len(both))
    return tuple(halves), torch.from_numpy(order)


def _ranges(starts: Any, counts: Any) -> Any:
    """The integers starts[i], ..., starts[i] + counts[i] - 1 for each i, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)


def _cumulative(counts: Any) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))


@contextmanager
def rotary_by_position(rotary: Any, packed: PackedSequences) -> Iterator[None]:
    """Make a rotary embedding module (Megatron-Core's `RotaryEmbedding` or `YarnRotaryEmbedding`) return the embedding
    of each token's position in its sequence, [t_local, 1, 1, d], instead of that of positions 0, 1, 2, ....

    Args:
        rotary: None without rotary embeddings.
    """
    if rotary is None:
        yield
        return

    def whole_sequence(_module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # packed_seq: for all positions up to the longest sequence, not split over context-parallel ranks
        return (packed.max_seqlen_q, *inputs[1:2]), {**named, "packed_seq": True}

    def at_positions(_module: Any, _inputs: Any, embedding: Any) -> Any:
        if isinstance(embedding, tuple):  # YaRN also returns its scale
            return embedding[0].index_select(0, packed.positions), *embedding[1:]
        return embedding.index_select(0, packed.positions)

    before = rotary.register_forward_pre_hook(whole_sequence, with_kwargs=True)
    with before, rotary.register_forward_hook(at_positions):
        yield
