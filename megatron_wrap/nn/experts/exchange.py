"""The exchange of rows between expert-parallel processes, beside which the backward pass computes a weight gradient."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from megatron_wrap.nn.experts.products import DeferredGradient
from megatron_wrap.parallel.collectives import start_exchange


def exchange_rows(
    rows: Tensor, group: Any, receive: list[int], send: list[int], deferred: DeferredGradient | None = None
) -> Tensor:
    """The rows [sum(receive), ...] that the processes of the group send to this one.

    Args:
        rows: [sum(send), ...], sorted by receiver.
        group: process group.
        receive: rows from each process of the group.
        send: rows to each.
        deferred: a gradient that the backward pass computes while it sends the rows' gradients back. The product whose
            gradient it is must have these rows behind it.
    """
    if deferred is None:
        received: Tensor = all_to_all(group, rows, receive, send)
        return received
    received = _ExchangeBesideGradient.apply(rows, deferred.weight, group, receive, send, deferred)
    return received


class _ExchangeBesideGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        _weight: Tensor,
        group: Any,
        receive: list[int],
        send: list[int],
        deferred: DeferredGradient,
    ) -> Tensor:
        ctx.group, ctx.receive, ctx.send, ctx.deferred = group, receive, send, deferred
        received, wait = start_exchange(rows, receive, send, group)
        wait()
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, wait = start_exchange(grads[0], ctx.send, ctx.receive, ctx.group)
        of_weight = ctx.deferred.compute()
        wait()
        return of_rows, of_weight, None, None, None, None
