"""The exchange of rows between expert-parallel processes, during which both passes compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.nn.experts.products import DeferredGradient
from megatron_wrap.parallel.collectives import start_exchange


def exchange_rows(
    rows: Tensor, group: Any, receive: list[int], send: list[int], deferred: DeferredGradient | None = None
) -> tuple[Tensor, Callable[[], object]]:
    """Begin to exchange rows: those [sum(receive), ...] that the processes of the group send to this one, and a
    function that must be called before they are used.

    Args:
        rows: [sum(send), ...], sorted by receiver.
        group: process group.
        receive: rows from each process of the group.
        send: rows to each.
        deferred: a gradient that the backward pass computes while it sends the rows' gradients back. The product whose
            gradient it is must follow the exchange.
    """
    waits: list[Callable[[], object]] = []
    weight = None if deferred is None else deferred.weight
    received: Tensor = _Exchange.apply(rows, weight, group, receive, send, deferred, waits)
    return received, waits[0]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        _weight: Tensor | None,
        group: Any,
        receive: list[int],
        send: list[int],
        deferred: DeferredGradient | None,
        waits: list[Callable[[], object]],
    ) -> Tensor:
        ctx.group, ctx.receive, ctx.send, ctx.deferred = group, receive, send, deferred
        received, wait = start_exchange(rows, receive, send, group)
        waits.append(wait)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, wait = start_exchange(grads[0], ctx.send, ctx.receive, ctx.group)
        of_weight = None if ctx.deferred is None else ctx.deferred.compute()
        wait()
        return of_rows, of_weight, None, None, None, None, None
