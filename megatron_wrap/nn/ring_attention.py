"""Attention over sequences that context-parallel ranks share, with keys and values that pass around a ring
(arXiv:2310.01889; `cp_comm_type: p2p`) during the attention to those that a rank has at the moment.

Rank r has chunks r and 2 * cp - 1 - r of each sequence (`parallel/zigzag.py`), also of each sequence of a packed row.
In step i it attends to the keys of rank j = r - i (modulo cp), of which a causal mask leaves one of three parts, of
equal work:

- its own keys: causal attention in the order of the rank's positions;
- those of an earlier rank: all queries attend to all of chunk j, and none to chunk 2 * cp - 1 - j;
- those of a later rank: the queries of the second chunk attend to all, those of the first to none.

Outputs are merged by their logsumexps, always in the order of the steps. The backward pass begins with the keys that
arrived last, which the forward pass keeps, and goes through the steps in reverse order: keys and values pass around the
ring in the other direction, and their gradients with them, in the dtype of the keys, from the rank before their owner
to the one after it. It sends them to the owner, which computes those of its own keys meanwhile.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_wrap.errors import LayoutError
from megatron_wrap.nn.attention_backend import kernel_with_logsumexp, packed_kernel_with_logsumexp
from megatron_wrap.nn.kernels.attention.attention_sinks import has_flash_kernel
from megatron_wrap.nn.kernels.attention.flash_attention import FlashKernel, flash_attention, merge_
from megatron_wrap.parallel.collectives import start_ring_transfer

if TYPE_CHECKING:
    from megatron_wrap.nn.packed_sequences import PackedSequences


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
    """Attention of this rank's queries to the keys of all ranks; see `ring_obstacle` for what is not supported.

    Args:
        query: [s_local, b, heads, d], this rank's two chunks of one sequence in each row; b = 1 for a packed row.
        key: [s_local, b, groups, d].
        value: [s_local, b, groups, d_v], d_v <= d.
        group: of the context-parallel ranks, more than one.
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


def ring_obstacle(
    query: Tensor, *, window: tuple[int, int] | None, dropout: float, softcap: float | None
) -> str | None:
    """Why a layer gathers keys and values although `cp_comm_type` is p2p; None: the ring can compute its attention."""
    if window is not None:
        return "a sliding window, of which a rank needs few keys"
    if softcap is not None:
        return "capped scores, which no kernel with a logsumexp computes"
    if dropout:
        return "dropout of attention weights"
    half_precision = query.dtype in (torch.float16, torch.bfloat16)
    if query.is_cuda and half_precision and not has_flash_kernel(query, query):
        return f"a head size of {query.shape[-1]}, which flash attention does not support on this GPU"
    return None


class _Part(enum.Enum):
    """Which queries of a rank attend to which keys of another."""

    ALL = enum.auto()
    SAME_RANK = enum.auto()
    """Its own keys, causal."""
    EARLIER = enum.auto()
    """All queries, the first chunks of keys."""
    LATER = enum.auto()
    """The second chunks of queries, all keys."""


class _Arrangement(Protocol):
    """Where a rank's chunks are. Tokens have dimension -3 of tensors, -1 of logsumexps."""

    def second(self, tensor: Tensor, dim: int) -> Tensor:
        """The tokens of second chunks, as a view or a copy."""

    def write_back(self, tensor: Tensor, dim: int, second: Tensor) -> None:
        """Replace these tokens by `second`, what `second` returned, with new values."""

    def keys(self, part: _Part, tensor: Tensor) -> Tensor:
        """A view of keys, values or their gradients: what the kernel of a part takes."""

    def kernel(self, part: _Part, query: Tensor, key: Tensor, value: Tensor, scale: float) -> FlashKernel:
        """The kernel of a part, for its queries and what `keys` returns."""


class _Rows(NamedTuple):
    """One sequence in each row; tensors are [b, s_local, heads, d]."""

    chunk: int

    def second(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.narrow(dim, self.chunk, self.chunk)

    def write_back(self, tensor: Tensor, dim: int, second: Tensor) -> None:
        """Nothing to do: it is a view."""

    def keys(self, part: _Part, tensor: Tensor) -> Tensor:
        return tensor[:, : self.chunk] if part is _Part.EARLIER else tensor

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

    def kernel(self, part: _Part, query: Tensor, key: Tensor, value: Tensor, scale: float) -> FlashKernel:
        ring = self.packed.ring
        assert ring is not None
        boundaries = {_Part.EARLIER: ring.earlier, _Part.LATER: ring.later}.get(part, ring.same_rank)
        return packed_kernel_with_logsumexp(query, key, value, boundaries, scale, part is _Part.SAME_RANK)


class _Ring(NamedTuple):
    """A `FlashKernel` over the keys of all ranks; its backward pass also needs the keys and values that came last."""

    group: Any
    causal: bool
    scale: float
    rows: _Arrangement

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        of_all = of_second = None  # outputs and logsumexps
        second_queries = block = query
        transfers = self.group.size() - 1
        for step, block in enumerate(_passed_on(_joined(key, value), self.group, transfers, to_next=True)):
            part = self._part(step)
            if part is _Part.LATER and of_second is None:
                assert of_all is not None
                second_queries = self.rows.second(query, -3)
                of_second = self.rows.second(of_all[0], -3), self.rows.second(of_all[1], -1)
            queries = second_queries if part is _Part.LATER else query
            inputs = (queries, *self._keys(part, *_parts(block, key, value)))
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
        return output.to(query.dtype), total, block

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, total, last = saved
        size, dtype = self.group.size(), self._dtype_of_sums(query)
        all_rows: tuple[Tensor, ...] = (grad, query, output, total)
        second_rows: tuple[Tensor, ...] = ()
        of_all, of_second = None, None
        travelling = _TravellingGradients(key, value, self.group)
        blocks = _passed_on(last, self.group, size - 2, to_next=False)
        for step, block in zip(reversed(range(1, size)), blocks, strict=True):
            part, keys_and_values = self._part(step), _parts(block, key, value)
            if part is _Part.LATER:
                second_rows = second_rows or self._second_rows(*all_rows)
                of_queries, *of_block = self._backward_of(part, second_rows, *keys_and_values)
                of_second = _added(of_second, of_queries, dtype)
            else:
                of_queries, *of_block = self._backward_of(part, all_rows, *keys_and_values)
                of_all = _added(of_all, of_queries, dtype)
            travelling.add_and_pass_on(self._keys(part, *travelling.arrived()), of_block)
        of_queries, *of_own = self._backward_of(self._part(0), all_rows, key, value)
        of_query = _added(of_all, of_queries, dtype)
        if of_second is not None:
            self.rows.write_back(of_query, -3, self.rows.second(of_query, -3).add_(of_second))
        of_key, of_value = travelling.arrived()
        return of_query.to(query.dtype), of_key.add_(of_own[0]), of_value.add_(of_own[1])

    def _backward_of(self, part: _Part, rows: tuple[Tensor, ...], key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the queries, keys and values of a part; rows: gradients of outputs, queries, outputs,
        logsumexps."""
        grad, query, output, total = rows
        inputs = (query, *self._keys(part, key, value))
        return self.rows.kernel(part, *inputs, self.scale).backward(grad, *inputs, output, total)

    def _part(self, step: int) -> _Part:
        if not self.causal:
            return _Part.ALL
        if step == 0:
            return _Part.SAME_RANK
        return _Part.EARLIER if step <= self.group.rank() else _Part.LATER

    def _keys(self, part: _Part, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows.keys(part, key), self.rows.keys(part, value)

    def _second_rows(self, *rows: Tensor) -> tuple[Tensor, ...]:
        dims = (-3, -3, -3, -1)
        return tuple(self.rows.second(tensor, dim).contiguous() for tensor, dim in zip(rows, dims, strict=True))

    def _dtype_of_sums(self, query: Tensor) -> torch.dtype:
        """fp32 (or fp64), except for two ranks, whose two summands are added before they are rounded."""
        return query.dtype if self.group.size() == 2 else torch.promote_types(query.dtype, torch.float32)


class _TravellingGradients:
    """Gradients of keys and values: a rank adds its own to those of the ranks before it and passes them on, while it
    computes the next ones."""

    def __init__(self, key: Tensor, value: Tensor, group: Any) -> None:
        self._like, self._group = (key, value), group
        self._sums = key.new_zeros(key.numel() + value.numel())
        self._finish: Callable[[], None] | None = None

    def add_and_pass_on(self, sums: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add gradients to views of what has `arrived`."""
        for total, part in zip(sums, gradients, strict=True):
            total += part
        received = torch.empty_like(self._sums)
        self._finish = start_ring_transfer(self._sums, received, self._group, to_next=False)
        self._sums = received

    def arrived(self) -> tuple[Tensor, Tensor]:
        """The sums of the ranks before this one, of the keys that this rank has now."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return _parts(self._sums, *self._like)


def _passed_on(block: Tensor, group: Any, transfers: int, *, to_next: bool) -> Iterator[Tensor]:
    """A tensor of this rank, then those of the ranks before it (after it: not `to_next`), one for each transfer; the
    next one arrives while one is in use."""
    for _ in range(transfers):
        received = torch.empty_like(block)
        finish = start_ring_transfer(block, received, group, to_next=to_next)
        yield block
        finish()
        block = received
    yield block


def _joined(key: Tensor, value: Tensor) -> Tensor:
    """A copy of both in one tensor to send, so that keys and values are one message; both are contiguous in it."""
    joined = key.new_empty(key.numel() + value.numel())
    for part, tensor in zip(_parts(joined, key, value), (key, value), strict=True):
        part.copy_(tensor)
    return joined


def _parts(joined: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    of_key, of_value = joined.split((key.numel(), value.numel()))
    return of_key.view(key.shape), of_value.view(value.shape)


def _added(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.to(dtype) if total is None else total.add_(part)
