"""Collectives: differentiable ones for losses, whose backward is the adjoint, and plain ones for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_wrap.parallel import zigzag
from megatron_wrap.parallel.peer_memory import peer_memory


class _SumOnGroup(torch.autograd.Function):
    """All-reduce (sum) in forward and backward: each rank's output depends on each rank's input with weight 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_on_group(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce (sum) of `tensor` (same shape on each rank) over `group`; the backward is the adjoint, also a sum.

    Use it if each rank then differentiates its share of the objective; not for sums over tensor-parallel ranks in a
    loss that is replicated over TP, where the backward is the identity.
    """
    return tensor if group.size() == 1 else _SumOnGroup.apply(tensor, group)


class _GatherOnGroup(torch.autograd.Function):
    """All-gather forward, reduce-scatter (sum) backward: each rank's output contains each rank's input once."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(gather_tensors(tensor, group), dim=dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        parts = [part.contiguous() for part in grad_outputs[0].chunk(ctx.group.size(), dim=ctx.dim)]
        grad = torch.empty_like(parts[0])
        dist.reduce_scatter(grad, parts, group=ctx.group)
        return grad, None, None


def gather_on_group(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All-gather of `tensor` (same shape on each rank), concatenated along `dim` in rank order.

    The backward is the adjoint: a rank's gradient is the sum over all ranks of the gradients of its part. Use it if
    each rank then differentiates its share of the objective, as for `sum_on_group`. The parts of context-parallel
    ranks are in zig-zag order; `parallel.zigzag.merge` restores the order of the sequence.
    """
    return tensor if group.size() == 1 else _GatherOnGroup.apply(tensor, dim, group)


def gather_sequence(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Gather the whole sequence, in its order, from the zig-zag parts of context-parallel ranks, on every rank.

    Args:
        part: local; 1 / group.size() of the sequence along `dim`: the positions of `parallel.zigzag.packed_positions`.

    Returns:
        The padded sequence along `dim`; the backward is the adjoint, as for `gather_on_group`.
    """
    size = group.size()
    return part if size == 1 else zigzag.merge(gather_on_group(part, dim, group).chunk(size, dim=dim), dim)


_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def reduce_in_place(tensor: Tensor, operation: Literal["sum", "max", "min"], group: ProcessGroup) -> None:
    """All-reduce a tensor in place, without autograd; no-op for a group of one."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=_REDUCTIONS[operation], group=group)


def all_reduce_values(values: list[float], group: ProcessGroup, device: torch.device) -> list[float]:
    """Sum a list of numbers (same length on each rank) over `group` in fp64 in one all-reduce; a group of one rank does
    not wait for the device."""
    if group.size() == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    reduce_in_place(tensor, "sum", group)
    return tensor.tolist()


def broadcast_object(value: Any, source_rank: int, group: ProcessGroup | None = None) -> Any:
    """Broadcast a picklable object from global rank `source_rank` to every rank of `group` (default: the world)."""
    if dist.get_world_size(group) == 1:  # a collective would create NCCL's communicator
        return value
    objects = [value]
    dist.broadcast_object_list(objects, src=source_rank, group=group)
    return objects[0]


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """All-gather of picklable objects, in rank order, on every rank of `group` (default: the world)."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, value, group=group)
    return objects


def average_detached(value: Tensor, group: ProcessGroup) -> Tensor:
    """Mean of a tensor (same shape on each rank) over `group`, on every rank; detached."""
    mean = value.detach().clone()
    reduce_in_place(mean, "sum", group)
    return mean / group.size()


def gather_tensors(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """All-gather of a tensor (same shape on each rank), in rank order, on every rank of `group`; without autograd."""
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def gather_first_dim(share: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather of a tensor (same shape on each rank), concatenated along its first dimension in rank order; without
    autograd, and for a GPU nothing but one collective."""
    whole = share.new_empty((group.size() * share.shape[0], *share.shape[1:]))
    dist.all_gather_into_tensor(whole, share.contiguous(), group=group)
    return whole


def gathering(share: Tensor, group: ProcessGroup, *, includes_self: bool = True) -> Callable[[], Tensor]:
    """Begin to gather the ranks' shares (same shape on each) along the first dimension; call the result to wait for
    them. They are valid until the group's next gathering begins. Without autograd.

    Args:
        includes_self: false: the rows of the rank's own share may have any values.
    """
    share = share.contiguous()
    memory = peer_memory(group, share)
    if memory is not None:
        exchange = memory.exchange("gathered", tuple(share.shape), share.dtype)
        for offset in range(1, group.size() + includes_self):
            exchange.send((group.rank() + offset) % group.size(), share, produced=False)
        return lambda: exchange.finish().flatten(0, 1)
    whole = share.new_empty((group.size() * share.shape[0], *share.shape[1:]))
    work = dist.all_gather_into_tensor(whole, share, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return whole

    return wait


class ExchangeOfShares:
    """Exchange of tensors of one shape, one from each rank of a group to each other rank; collective, without autograd.
    On GPUs of one host their copy engines move them."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, group: ProcessGroup) -> None:
        """Begin to exchange tensors of `shape`, with the dtype and device of `like`."""
        memory = peer_memory(group, like)
        self._group = group
        self._peers = None if memory is None else memory.exchange("shares", shape, like.dtype)
        self._received = [] if memory is not None else [like.new_empty(shape) for _ in range(1, group.size())]
        self._transfers: list[tuple[Callable[[], None], Tensor]] = []  # with the sent tensors, which must not be freed

    def send(self, tensor: Tensor, offset: int) -> None:
        """Begin to send a contiguous tensor to the rank that comes `offset` (from 1, in this order) after this one."""
        if self._peers is None:
            finish = _start_transfer([tensor], [self._received[offset - 1]], self._group, offset)
            self._transfers.append((finish, tensor))
        else:
            self._peers.send((self._group.rank() + offset) % self._group.size(), tensor)

    def finish(self) -> list[Tensor]:
        """Wait for the tensors of all other ranks, and return them; they are valid until the group's next exchange
        begins."""
        if self._peers is None:
            for finish, _ in self._transfers:
                finish()
            return self._received
        received = self._peers.finish()
        return [received[rank] for rank in range(self._group.size()) if rank != self._group.rank()]


def broadcast(tensor: Tensor, source_rank: int) -> None:
    """Broadcast `tensor` (contiguous, same shape on each rank) in place from global rank `source_rank` to all ranks."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=source_rank)


def broadcast_on(tensor: Tensor, source: int, group: ProcessGroup) -> None:
    """Broadcast `tensor` (contiguous, same shape on each rank) in place from rank `source` of `group` to the group."""
    if group.size() > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)


def send(tensor: Tensor, to_rank: int, group: ProcessGroup | None = None) -> None:
    """Send a contiguous tensor to global rank `to_rank`, which must call `receive`. The tensor can then be reused."""
    dist.send(tensor, dst=to_rank, group=group)


def receive(tensor: Tensor, from_rank: int, group: ProcessGroup | None = None) -> None:
    """Receive into a contiguous tensor from global rank `from_rank`, which must call `send` on the same group."""
    dist.recv(tensor, src=from_rank, group=group)


def start_exchange(
    rows: Tensor, receive: list[int], send: list[int], group: ProcessGroup, size: int | None = None
) -> tuple[Tensor, Callable[[], object]]:
    """Begin an all-to-all. Returns the rows [size, ...], of which the first sum(receive) arrive and the others are
    undefined, and a function that waits until they have arrived.

    Args:
        rows: at least [sum(send), ...], sorted by receiver; unchanged until the wait. Further rows are not sent.
        receive: rows from each process of the group.
        send: rows to each process of the group.
        size: number of rows of the result; None: sum(receive).
    """
    arriving, rows = sum(receive), rows[: sum(send)].contiguous()
    received = rows.new_empty(arriving if size is None else size, *rows.shape[1:])
    work = dist.all_to_all_single(received[:arriving], rows, receive, send, group=group, async_op=True)
    return received, work.wait


def start_ring_transfer(
    sent: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    group: ProcessGroup,
    *,
    offset: int,
    purpose: str,
    elements: int,
    owned: bool = False,
) -> Callable[[], list[Tensor]]:
    """Start to send tensors to the rank that comes `offset` after this one in `group` (modulo its size), and to receive
    others from the one as many before; collective, without autograd. On GPUs of one host their copy engines move them.

    Args:
        sent: contiguous, of one dtype.
        shapes: shapes of the tensors that are received, in the same dtype.
        offset: distance to the receiving rank; negative: an earlier rank.
        purpose: name of the transfer's purpose; each has one transfer at a time.
        elements: upper bound of the number of elements of any rank's tensors together; the same number on each rank.
        owned: whether the received tensors own their memory; else they are valid until the purpose's next transfer from
            the same rank begins.

    Returns:
        A function that waits (on a GPU, the current stream does) until all tensors can be used, and returns those that
        were received.
    """
    memory = peer_memory(group, sent[0])
    if memory is None:
        received = [sent[0].new_empty(shape) for shape in shapes]
        wait = _start_transfer(sent, received, group, offset)

        def finish() -> list[Tensor]:
            wait()
            return received

        return finish
    target, source = ((group.rank() + step) % group.size() for step in (offset, -offset))
    exchange = memory.exchange(purpose, (elements,), sent[0].dtype, sources=[source], targets=[target])
    exchange.send(target, *sent, produced=False)
    counts = [torch.Size(shape).numel() for shape in shapes]

    def finish_with_peers() -> list[Tensor]:
        arrived = exchange.finish()[source][: sum(counts)]
        parts = (arrived.clone() if owned else arrived).split(counts)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return finish_with_peers


def _start_transfer(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup, offset: int
) -> Callable[[], None]:
    """Start to send contiguous tensors to the rank that comes `offset` after this one, and to receive those of the rank
    as many before; the result waits until all can be used."""
    size, rank = group.size(), group.rank()
    target, source = (dist.get_global_rank(group, (rank + step) % size) for step in (offset, -offset))
    operations = [
        *(dist.P2POp(dist.isend, tensor, target, group) for tensor in sent),
        *(dist.P2POp(dist.irecv, tensor, source, group) for tensor in received),
    ]
    transfers = dist.batch_isend_irecv(operations)

    def finish() -> None:
        for transfer in transfers:
            transfer.wait()

    return finish
