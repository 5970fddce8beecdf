"""The exchange of rows between expert-parallel processes, during which both passes compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.nn.experts.products import DeferredGradient
from megatron_wrap.parallel.collectives import start_exchange


def exchange_rows(
    tensors: Sequence[Tensor],
    group: Any,
    receive: list[int],
    send: list[int],
    deferred: DeferredGradient | None = None,
) -> tuple[tuple[Tensor, ...], list[Callable[[], object]]]:
    """Begin to exchange rows, one tensor after the other. Returns for each tensor the rows [sum(receive), ...] that the
    processes of the group send to this one, and a function that must be called before they are used.

    Args:
        tensors: at least [sum(send), ...] each, sorted by receiver; further rows are not sent, and their gradients are
            undefined.
        group: process group.
        receive: rows from each process of the group.
        send: rows to each process of the group.
        deferred: a gradient that the backward pass computes while it sends the rows' gradients back. The matmul that it
            belongs to must follow the exchange.
    """
    waits: list[Callable[[], object]] = []
    weight = None if deferred is None else deferred.weight
    received: tuple[Tensor, ...] = _Exchange.apply(group, receive, send, deferred, waits, weight, *tensors)
    return received, waits


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: Any,
        receive: list[int],
        send: list[int],
        deferred: DeferredGradient | None,
        waits: list[Callable[[], object]],
        _weight: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.receive, ctx.send, ctx.deferred = group, receive, send, deferred
        ctx.sizes = [tensor.shape[0] for tensor in tensors]
        received = []
        for tensor in tensors:
            rows, wait = start_exchange(tensor, receive, send, group)
            received.append(rows)
            waits.append(wait)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchanges = [
            start_exchange(grad, ctx.send, ctx.receive, ctx.group, size) if is_needed else None
            for grad, size, is_needed in zip(grads, ctx.sizes, ctx.needs_input_grad[-len(grads) :], strict=True)
        ]
        of_weight = None if ctx.deferred is None else ctx.deferred.compute()
        of_tensors = []
        for exchange in exchanges:
            if exchange is not None:
                exchange[1]()
            of_tensors.append(None if exchange is None else exchange[0])
        return None, None, None, None, None, of_weight, *of_tensors
