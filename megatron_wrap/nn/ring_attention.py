"""Attention over sequences that context-parallel ranks share, with keys and values that pass around a ring
(arXiv:2310.01889; `cp_comm_type: p2p`) during the attention to those that a rank has at the moment.

Rank r has chunks r and 2 * cp - 1 - r of each sequence (`parallel/context.py`). In step i it attends to the keys of
rank j = r - i (modulo cp), of which a causal mask leaves one of three shapes:

- its own keys: causal attention in the order of the rank's positions;
- those of an earlier rank: all queries attend to all of chunk j, and none to chunk 2 * cp - 1 - j;
- those of a later rank: the queries of the second chunk attend to all, those of the first to none.

Outputs are merged by their logsumexps in fp32, always in the order of the steps. The backward pass repeats the steps;
the gradients of keys and values travel along in the dtype of the keys, from the rank that follows their owner to the
one before it, which sends them to the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_wrap.errors import LayoutError
from megatron_wrap.nn.attention_backend import kernel_with_logsumexp
from megatron_wrap.nn.kernels.attention_sinks import has_flash_kernel
from megatron_wrap.nn.kernels.flash_attention import FlashKernel, flash_attention, merge_
from megatron_wrap.parallel.collectives import start_ring_transfer

_ALL = slice(None)


def attend_in_ring(
    query: Tensor, key: Tensor, value: Tensor, group: Any, *, causal: bool, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; see `ring_obstacle` for what is not supported.

    Args:
        query: [s_local, b, heads, d], this rank's two chunks of one sequence in each row.
        key: [s_local, b, groups, d].
        value: [s_local, b, groups, d_v], d_v <= d.
        group: of the context-parallel ranks, more than one.
        sinks: [heads], as in `attend`; None: none.

    Returns:
        [s_local, b, heads, d_v].

    Raises:
        LayoutError: the number of tokens is odd.
    """
    if query.shape[0] % 2:
        raise LayoutError(
            f"a context-parallel rank has two equal chunks of a sequence, and {query.shape[0]} tokens are not; "
            f"pad sequences to a multiple of {2 * group.size()}"
        )
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return flash_attention(query, key, value, sinks, _Ring(group, causal, scale)).transpose(0, 1)


def ring_obstacle(
    query: Tensor, *, packed: bool, window: tuple[int, int] | None, dropout: float, softcap: float | None
) -> str | None:
    """Why a layer gathers keys and values although `cp_comm_type` is p2p; None: the ring can compute its attention."""
    if packed:
        return "packed rows"
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


class _Ring(NamedTuple):
    """A `FlashKernel` over the keys of all ranks, of tensors [b, s_local, heads, d]."""

    group: Any
    causal: bool
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(query.dtype, torch.float32)
        output, total = query.new_empty(0), query.new_empty(0)
        for step, (keys, values) in enumerate(self._blocks(key, value)):
            rows, used = self._shape(step, query.shape[1])
            inputs = (query[:, rows], keys[:, used], values[:, used])
            block, block_total = self._kernel(step, *inputs).forward(*inputs)
            if step == 0:
                output, total = block.to(precise, copy=True), block_total.contiguous()
            else:
                merge_(output[:, rows], total[..., rows], block, block_total)
        return output.to(query.dtype), total

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, total = saved
        of_query = torch.zeros(query.shape, dtype=total.dtype, device=query.device)
        own: tuple[Tensor, ...] = ()
        travelling = _TravellingGradients(key, value, self.group)
        for step, (keys, values) in enumerate(self._blocks(key, value)):
            rows, used = self._shape(step, query.shape[1])
            inputs = (query[:, rows], keys[:, used], values[:, used])
            of_rows, *of_block = self._kernel(step, *inputs).backward(
                grad[:, rows], *inputs, output[:, rows].contiguous(), total[..., rows].contiguous()
            )
            of_query[:, rows] += of_rows
            if step == 0:
                own = tuple(of_block)
            else:
                travelling.add_and_pass_on(used, *of_block)
        of_key, of_value = travelling.arrived()
        return of_query.to(query.dtype), of_key.add_(own[0]), of_value.add_(own[1])

    def _shape(self, step: int, length: int) -> tuple[slice, slice]:
        """The rank's queries that attend in a step, and the keys that they attend to."""
        rank = self.group.rank()
        if step == 0 or not self.causal:
            return _ALL, _ALL
        earlier = step <= rank
        return (_ALL, slice(0, length // 2)) if earlier else (slice(length // 2, None), _ALL)

    def _kernel(self, step: int, query: Tensor, key: Tensor, value: Tensor) -> FlashKernel:
        return kernel_with_logsumexp(query, key, value, self.scale, self.causal and step == 0)

    def _blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of this rank and of those before it; the next ones arrive while these are in use."""
        present = _joined(key, value)
        spare = torch.empty_like(present)
        for step in range(self.group.size()):
            if step == self.group.size() - 1:
                yield _parts(present, key, value)
                return
            finish = start_ring_transfer(present, spare, self.group)
            yield _parts(present, key, value)
            finish()
            present, spare = spare, present


class _TravellingGradients:
    """Gradients of keys and values: a rank adds its own to those of the ranks before it and passes them on, while it
    computes the next ones."""

    def __init__(self, key: Tensor, value: Tensor, group: Any) -> None:
        self._like, self._group = (key, value), group
        self._sums = key.new_zeros(key.numel() + value.numel())
        self._spare = torch.empty_like(self._sums)
        self._finish: Callable[[], None] | None = None

    def add_and_pass_on(self, used: slice, of_key: Tensor, of_value: Tensor) -> None:
        """Add gradients of the keys `used` of the block that this rank has now."""
        for total, part in zip(self.arrived(), (of_key, of_value), strict=True):
            total[:, used] += part
        self._finish = start_ring_transfer(self._sums, self._spare, self._group)

    def arrived(self) -> tuple[Tensor, Tensor]:
        """The sums of the ranks before this one, of the keys that this rank has now."""
        if self._finish is not None:
            self._finish()
            self._finish = None
            self._sums, self._spare = self._spare, self._sums
        return _parts(self._sums, *self._like)


def _joined(key: Tensor, value: Tensor) -> Tensor:
    """One tensor to send, so that keys and values are one message; both are contiguous in it."""
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _parts(joined: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    of_key, of_value = joined.split((key.numel(), value.numel()))
    return of_key.view(key.shape), of_value.view(value.shape)
