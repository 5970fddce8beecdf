"""Collectives with their true adjoints, for losses, and plain ones for the engine's bookkeeping."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


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
