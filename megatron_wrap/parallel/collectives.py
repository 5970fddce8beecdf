"""Collectives with their true adjoints, for losses, and plain ones for the engine's bookkeeping."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_wrap.parallel import context


class _SumOnGroup(torch.autograd.Function):
    """All-reduce (sum) forward and backward: every rank's output depends on every rank's input with weight 1."""

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
    """Sum of `tensor` (same shape on each rank) over `group`, on every rank; the backward is the adjoint, a sum too.

    Right where each rank goes on to differentiate its own share of the objective. Not for tensor-parallel sums of a
    loss that is replicated over TP: there the backward is the identity.
    """
    return tensor if group.size() == 1 else _SumOnGroup.apply(tensor, group)


class _GatherOnGroup(torch.autograd.Function):
    """All-gather forward, reduce-scatter (sum) backward: every rank's output holds every rank's input once."""

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
    """Each rank's `tensor` (same shape on each) joined along `dim` in rank order, on every rank of `group`.

    The backward is the adjoint: a rank's gradient is the sum over all ranks of the gradients of its part. Right where
    each rank goes on to differentiate its own share of the objective, as for `sum_on_group`. Parts of a sequence that
    context-parallel ranks hold are zig-zag: `parallel.context.merge` puts the parts into the sequence's order.
    """
    return tensor if group.size() == 1 else _GatherOnGroup.apply(tensor, dim, group)


def gather_sequence(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The whole sequence in its order from each context-parallel rank's zig-zag part, on every rank of `group`.

    Args:
        part: local; 1 / group.size() of the sequence along `dim`, as `parallel.context.split` cuts it.

    Returns:
        As long along `dim` as the padded sequence is; the backward is the adjoint, as for `gather_on_group`.
    """
    size = group.size()
    return part if size == 1 else context.merge(gather_on_group(part, dim, group).chunk(size, dim=dim), dim)


_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def reduce_in_place(tensor: Tensor, operation: Literal["sum", "max", "min"], group: ProcessGroup) -> None:
    """All-reduce a tensor without a graph, in place; nothing to do in a group of one."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=_REDUCTIONS[operation], group=group)


def all_reduce_values(values: list[float], group: ProcessGroup, device: torch.device) -> list[float]:
    """Sum a list of numbers (same length on each rank) over `group` in fp64, in one collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    reduce_in_place(tensor, "sum", group)
    return tensor.tolist()


def broadcast_object(value: Any, source_rank: int, group: ProcessGroup | None = None) -> Any:
    """A picklable object of global rank `source_rank`, on every rank of `group` (default: the world)."""
    box = [value]
    dist.broadcast_object_list(box, src=source_rank, group=group)
    return box[0]


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Each rank's picklable object, in rank order, on every rank of `group` (default: the world)."""
    boxes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(boxes, value, group=group)
    return boxes


def average_detached(value: Tensor, group: ProcessGroup) -> Tensor:
    """Mean of a tensor (same shape on each rank) over `group`, detached, on every rank."""
    mean = value.detach().clone()
    reduce_in_place(mean, "sum", group)
    return mean / group.size()


def gather_tensors(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Each rank's tensor (same shape on each), in rank order, on every rank of `group`; without a graph."""
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def broadcast(tensor: Tensor, source_rank: int) -> None:
    """Fill `tensor` (same shape on each rank, contiguous) on every rank with that of global rank `source_rank`."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=source_rank)


def broadcast_on(tensor: Tensor, source: int, group: ProcessGroup) -> None:
    """Fill `tensor` (same shape on each rank, contiguous) on every rank of `group` with that of its rank `source`."""
    if group.size() > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)


def send(tensor: Tensor, to_rank: int, group: ProcessGroup | None = None) -> None:
    """Give a contiguous tensor to global rank `to_rank`, which calls `receive`; waits until it is on its way."""
    dist.send(tensor, dst=to_rank, group=group)


def receive(tensor: Tensor, from_rank: int, group: ProcessGroup | None = None) -> None:
    """Fill a contiguous tensor with what global rank `from_rank` sends, over the same group."""
    dist.recv(tensor, src=from_rank, group=group)
