"""Attention over sequences that context-parallel ranks share, with keys and values that pass around a ring
(arXiv:2310.01889; `cp_comm_type: p2p`). The next keys and values arrive during the attention to the current ones.

Rank r has chunks r and 2 * cp - 1 - r of each sequence (`parallel/zigzag.py`), also of each sequence of a packed row.
In step i it attends to the keys of rank j = r - i (modulo cp). A causal mask leaves one of three parts, of equal work:

- its own keys: causal attention in the order of the rank's positions;
- the keys of an earlier rank: all queries attend to all of chunk j, and none to chunk 2 * cp - 1 - j;
- the keys of a later rank: the queries of the second chunk attend to all, those of the first to none.

A rank sends its keys, or the part that the receiver needs, to the next rank during step 0, to the one after it during
step 1, and so on. Outputs are merged by their logsumexps, always in the order of the steps. The backward pass begins
with the keys that arrived last, which the forward pass keeps, and takes the steps in reverse order. The gradients of a
step's keys are sent to the keys' owner, in the dtype of the keys, during the next step; the last step of a rank is that
of its own keys.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_wrap.errors import LayoutError
from megatron_wrap.nn.attention.choice import kernel_with_logsumexp, packed_kernel_with_logsumexp
from megatron_wrap.nn.attention.flash import FlashKernel, add_, flash_attention, merge_
from megatron_wrap.parallel.collectives import start_ring_transfer

if TYPE_CHECKING:
    from megatron_wrap.nn.attention.packed_sequences import PackedSequences


def attend_in_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any,
    *,
    causal: bool,
    scale: float,
    sinks: Tensor | None = None,
    packed: PackedSequences | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; see `choice.ring_obstacle` for what is not supported.

    Args:
        query: [s_local, b, heads, d], this rank's two chunks of one sequence in each row; b = 1 for a packed row.
        key: [s_local, b, groups, d].
        value: [s_local, b, groups, d_v], d_v <= d.
        group: process group of the context-parallel ranks, more than one.
        sinks: [heads], as in `attend`; None: none.
        packed: the sequences of a packed row, of which this rank has two chunks each; None: one sequence in each row.

    Returns:
        [s_local, b, heads, d_v].

    Raises:
        LayoutError: the number of tokens is odd, or not that of the packed sequences.
    """
    if packed is not None:
        if query.shape[0] * group.size() != sum(packed.lengths):
            raise LayoutError(
                f"sequences of lengths {list(packed.lengths)[:8]} do not match {query.shape[0]} tokens on each of "
                f"{group.size()} context-parallel ranks: they must add up to {query.shape[0] * group.size()}"
            )
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        ring = _Ring(group, causal, scale, _PackedRow(packed))
        return flash_attention(query, key, value, sinks, ring).unsqueeze(1)
    if query.shape[0] % 2:
        raise LayoutError(
            f"a context-parallel rank has two equal chunks of a sequence, and {query.shape[0]} tokens are not; "
            f"pad sequences to a multiple of {2 * group.size()}"
        )
    ring = _Ring(group, causal, scale, _Rows(query.shape[0] // 2))
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return flash_attention(query, key, value, sinks, ring).transpose(0, 1)


class _Part(enum.Enum):
    """Part of the attention between a rank's queries and the keys of the same or another rank."""

    ALL = enum.auto()
    SAME_RANK = enum.auto()
    """All queries and the rank's own keys, causal."""
    EARLIER = enum.auto()
    """All queries and the first chunks of an earlier rank's keys."""
    LATER = enum.auto()
    """The second chunks of queries and all keys of a later rank."""


class _Arrangement(Protocol):
    """Layout of a rank's chunks in its tensors. Tokens are dimension -3 of tensors, -1 of logsumexps."""

    def second(self, tensor: Tensor, dim: int) -> Tensor:
        """The tokens of second chunks, as a view or a copy."""

    def write_back(self, tensor: Tensor, dim: int, second: Tensor) -> None:
        """Write new values of the tokens of second chunks: `second`, the modified result of the method `second`."""

    def keys(self, part: _Part, tensor: Tensor) -> Tensor:
        """A view of a rank's keys, values or their gradients, with the tokens that the kernel of a part takes."""

    def tokens_first(self, tensor: Tensor) -> Tensor:
        """A view with the tokens first, in the order of memory. The method is its own inverse."""

    def kernel(self, part: _Part, query: Tensor, key: Tensor, value: Tensor, scale: float) -> FlashKernel:
        """The kernel of a part, for its queries and the result of `keys`."""


class _Rows(NamedTuple):
    """One sequence in each row; tensors are [b, s_local, heads, d]."""

    chunk: int

    def second(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.narrow(dim, self.chunk, self.chunk)

    def write_back(self, tensor: Tensor, dim: int, second: Tensor) -> None:
        """Do nothing: `second` is a view."""

    def keys(self, part: _Part, tensor: Tensor) -> Tensor:
        return tensor[:, : self.chunk] if part is _Part.EARLIER else tensor

    def tokens_first(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)

    def kernel(self, part: _Part, query: Tensor, key: Tensor, value: Tensor, scale: float) -> FlashKernel:
        return kernel_with_logsumexp(query, key, value, scale, part is _Part.SAME_RANK)


class _PackedRow(NamedTuple):
    """Several sequences in one row; tensors are [t_local, heads, d]. The boundaries select keys, without a copy."""

    packed: PackedSequences

    def second(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.index_select(dim, self.packed.halves[1].queries)

    def write_back(self, tensor: Tensor, dim: int, second: Tensor) -> None:
        tensor.index_copy_(dim, self.packed.halves[1].queries, second)

    def keys(self, part: _Part, tensor: Tensor) -> Tensor:
        return tensor

    def tokens_first(self, tensor: Tensor) -> Tensor:
        return tensor

    def kernel(self, part: _Part, query: Tensor, key: Tensor, value: Tensor, scale: float) -> FlashKernel:
        ring = self.packed.ring
        assert ring is not None
        boundaries = {_Part.EARLIER: ring.earlier, _Part.LATER: ring.later}.get(part, ring.same_rank)
        return packed_kernel_with_logsumexp(query, key, value, boundaries, scale, part is _Part.SAME_RANK)


class _Ring(NamedTuple):
    """A `FlashKernel` over the keys of all ranks; its backward pass also needs the keys and values that arrived
    last."""

    group: Any
    causal: bool
    scale: float
    rows: _Arrangement

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        of_all = of_second = None  # outputs and logsumexps
        second_queries, block = query, (key, value)
        blocks = self._arriving(block, range(1, self.group.size()), key, value)
        for step, block in enumerate(blocks):
            part = self._part(step)
            if part is _Part.LATER and of_second is None:
                assert of_all is not None
                second_queries = self.rows.second(query, -3)
                of_second = self.rows.second(of_all[0], -3), self.rows.second(of_all[1], -1)
            inputs = (second_queries if part is _Part.LATER else query, *block)
            output, total, *_ = self.rows.kernel(part, *inputs, self.scale).forward(*inputs)
            merged = of_second if part is _Part.LATER else of_all
            if merged is None:
                of_all = output.to(self._dtype_of_sums(query)), total.contiguous()
            else:
                merge_(merged[0], merged[1], output, total)
        assert of_all is not None
        output, total = of_all
        if of_second is not None:
            self.rows.write_back(output, -3, of_second[0])
            self.rows.write_back(total, -1, of_second[1])
        return output.to(query.dtype), total, *block

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, total, *last = saved
        size, dtype = self.group.size(), self._dtype_of_sums(query)
        all_rows: tuple[Tensor, ...] = (grad, query, output, total)
        second_rows: tuple[Tensor, ...] = ()
        of_all, of_second = None, None
        of_others = _GradientsOfOthers(self, key, value)
        blocks = self._arriving((last[0], last[1]), range(size - 2, 0, -1), key, value)
        for step, block in zip(range(size - 1, 0, -1), blocks, strict=True):
            part = self._part(step)
            if part is _Part.LATER:
                second_rows = second_rows or self._second_rows(*all_rows)
                of_queries, *of_block = self._backward_of(part, second_rows, *block)
                of_second = _added(of_second, of_queries, dtype)
            else:
                of_queries, *of_block = self._backward_of(part, all_rows, *block)
                of_all = _added(of_all, of_queries, dtype)
            of_others.exchange(step, of_block)
        of_queries, *of_own = self._backward_of(self._part(0), all_rows, key, value)
        sums = of_others.sums(of_own)
        if of_second is None:
            assert of_all is not None
            add_([*sums, self._in_memory(of_all, of_queries)])
            return of_all.to(query.dtype), of_own[0], of_own[1]
        of_query = _added(of_all, of_queries, dtype)
        second = self.rows.second(of_query, -3)
        add_([*sums, self._in_memory(second, of_second)])
        self.rows.write_back(of_query, -3, second)
        return of_query.to(query.dtype), of_own[0], of_own[1]

    def _in_memory(self, total: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows.tokens_first(total), self.rows.tokens_first(part)

    def part_of(self, rank: int, step: int, tensor: Tensor) -> Tensor:
        """The part of keys, values or their gradients that a rank takes in a step, tokens first."""
        return self.rows.tokens_first(self.rows.keys(self._part(step, rank), tensor))

    def _arriving(
        self, block: tuple[Tensor, Tensor], steps: Iterable[int], key: Tensor, value: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`block`, then the keys and values of these steps; the next ones arrive while some are in use."""
        for step in steps:
            finish = self._start_to_send(step, key, value)
            yield block
            of_key, of_value = finish()
            block = self.rows.tokens_first(of_key), self.rows.tokens_first(of_value)
        yield block

    def _start_to_send(self, step: int, key: Tensor, value: Tensor) -> Callable[[], list[Tensor]]:
        rank, size = self.group.rank(), self.group.size()
        return start_ring_transfer(
            [self.part_of((rank + step) % size, step, tensor).contiguous() for tensor in (key, value)],
            [self.part_of(rank, step, tensor).shape for tensor in (key, value)],
            self.group,
            offset=step,
            purpose="keys",
            elements=key.numel() + value.numel(),
            owned=step == size - 1,  # the backward pass needs them
        )

    def _backward_of(self, part: _Part, rows: tuple[Tensor, ...], key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the queries, keys and values of a part; `rows`: gradients of outputs, queries, outputs,
        logsumexps."""
        grad, query, output, total = rows
        inputs = (query, key, value)
        return self.rows.kernel(part, *inputs, self.scale).backward(grad, *inputs, output, total)

    def _part(self, step: int, rank: int | None = None) -> _Part:
        """Part of the attention that a rank, by default this one, computes in a step."""
        if not self.causal:
            return _Part.ALL
        if step == 0:
            return _Part.SAME_RANK
        return _Part.EARLIER if step <= (self.group.rank() if rank is None else rank) else _Part.LATER

    def _second_rows(self, *rows: Tensor) -> tuple[Tensor, ...]:
        dims = (-3, -3, -3, -1)
        return tuple(self.rows.second(tensor, dim).contiguous() for tensor, dim in zip(rows, dims, strict=True))

    def _dtype_of_sums(self, query: Tensor) -> torch.dtype:
        """Dtype of sums over steps: fp32 (or fp64); for two ranks that of the query, since both summands are added
        before they are rounded."""
        return query.dtype if self.group.size() == 2 else torch.promote_types(query.dtype, torch.float32)


class _GradientsOfOthers:
    """Gradients of a rank's keys and values from the ranks that attended to them. The first ones that arrive contain
    all tokens of later ones, see `_Ring._part`."""

    def __init__(self, ring: _Ring, key: Tensor, value: Tensor) -> None:
        self._ring, self._like = ring, (key, value)
        self._sums: list[Tensor] = []
        self._finish: Callable[[], list[Tensor]] | None = None

    def exchange(self, step: int, gradients: Sequence[Tensor]) -> None:
        """Start to send the gradients of a step's keys and values to their owner, and to receive those of another
        rank's step."""
        self._add_arrived()
        group, rows = self._ring.group, self._ring.rows
        other = (group.rank() + step) % group.size()
        self._finish = start_ring_transfer(
            [rows.tokens_first(tensor).contiguous() for tensor in gradients],
            [self._ring.part_of(other, step, tensor).shape for tensor in self._like],
            group,
            offset=-step,
            purpose="gradients",
            elements=sum(tensor.numel() for tensor in self._like),
        )

    def sums(self, gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs for `add_`: the rank's own gradients, and the received sums to be added to them."""
        self._add_arrived()
        rows = self._ring.rows
        return [
            (rows.tokens_first(total)[: part.shape[0]], part) for total, part in zip(gradients, self._sums, strict=True)
        ]

    def _add_arrived(self) -> None:
        if self._finish is None:
            return
        arrived = self._finish()
        if self._sums:
            add_([(total[: part.shape[0]], part) for total, part in zip(self._sums, arrived, strict=True)])
        else:
            self._sums = arrived


def _added(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.to(dtype) if total is None else total.add_(part)
