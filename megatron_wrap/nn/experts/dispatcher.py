"""Sends tokens to the processes of their experts and back, with rows that are sorted on the device.

Replaces Megatron-Core's all-to-all dispatcher, which waits for the GPU in each layer even if all experts are on one
process, sends a row for each expert of a token, and splits and joins one chunk of rows for each expert and sender. Here
a process receives each token once, however many of its experts process the token. The host waits once, for the sizes of
the exchange, and not at all if neither experts nor tokens are distributed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_wrap.nn.experts.matmuls import DeferredGradient, RowEnds
from megatron_wrap.nn.experts.permutation import RowOrder, row_order, rows_of_tokens, sums_of_rows
from megatron_wrap.parallel.collectives import gather_first_dim, start_exchange
from megatron_wrap.platform.base.read_on_host import start_host_copy


def can_sort_on_device(config: Any) -> bool:
    """Whether every token has `moe_router_topk` rows and the exchange is a plain all-to-all, as `SortingDispatcher`
    needs."""
    dropless = config.moe_expert_capacity_factor is None and not config.moe_router_padding_for_quantization
    return config.moe_token_dispatcher_type == "alltoall" and dropless and not config.moe_shared_expert_overlap


def graph_ends_before_exchange(config: Any) -> bool:
    """Whether a CUDA graph of a layer contains what precedes its exchange alone, see `PartlyCapturedLayer`; else it
    contains all of the layer."""
    return can_sort_on_device(config) and config.recompute_granularity is None and config.moe_latent_size is None


class SortingDispatcher(MoEAlltoAllTokenDispatcher):
    """Sorts rows on the device; see `MoEAlltoAllTokenDispatcher` for the arguments.

    One forward pass calls, in this order, `dispatch_preprocess`, `token_dispatch`, `dispatch_postprocess`,
    `combine_preprocess`, `token_combine` and `combine_postprocess`. T is the number of this process's tokens, R the
    number of rows of the local experts, L the number of local experts.
    """

    sent: RowOrder
    """Order of this process's tokens by receiving process."""
    order: RowOrder
    """Order of the tokens on this process by local expert."""
    sizes: _ExchangeSizes | None = None
    """Sizes of the exchange; None: nothing is exchanged."""
    _counts: Tensor
    """Argument of `sizes`, on the device."""
    _deferred: DeferredGradient | None = None
    _waits: Sequence[Callable[[], object]] = ()
    """Functions that wait for the weights, then for the tokens, of a running exchange; empty without one."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [T, H] of the hidden states [..., H], and the weights [T, experts] of their experts. Nothing waits for
        a GPU, and no shape depends on values, so that a CUDA graph can contain this.

        Args:
            routing_map: bool [T, experts].
            probs: [T, experts], the router's weights, at least 0.
        """
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        if self._exchanges:
            width = min(self.config.moe_router_topk, self.ep_size)
            self.sent = row_order(routing_map, self.ep_size, width)
            self._counts = gather_first_dim(self.sent.totals, self.tp_ep_group)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), probs

    @property
    def prepared(self) -> tuple[Tensor, ...]:
        """Tensors that `dispatch_preprocess` leaves for the following phases."""
        return (self.routing_map, self._counts, *self.sent) if self._exchanges else (self.routing_map,)

    def continue_with(self, prepared: Sequence[Tensor], hidden_shape: torch.Size) -> None:
        """Continue after a `dispatch_preprocess` that a CUDA graph has replayed.

        Args:
            prepared: value of `prepared` after that call.
            hidden_shape: shape of its hidden states.
        """
        self.hidden_shape, self.routing_map = hidden_shape, prepared[0]
        if self._exchanges:
            self._counts, self.sent = prepared[1], RowOrder(*prepared[2:])

    @property
    def _exchanges(self) -> bool:
        return self.ep_size > 1 or self.tp_size > 1

    def compute_beside_exchange(self, deferred: DeferredGradient) -> None:
        """Compute a gradient in the backward pass of the next `token_dispatch`, during its exchange."""
        self._deferred = deferred

    def token_dispatch(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that local experts process, and their weights [tokens, L] for these experts. After an exchange,
        weights are negative where an expert does not process a token, and only `dispatch_postprocess` may read the
        results."""
        if not self._exchanges:
            return tokens, weights
        self.sizes = _ExchangeSizes(self._counts, self.ep_group.rank(), self.tp_rank, self.tp_size)
        rows, of_rows = rows_of_tokens(tokens, weights, self.sent, None, self.routing_map)  # before the host waits
        send, receive = self.sizes.send, self.sizes.receive
        deferred, self._deferred = self._deferred, None
        received, self._waits = exchange_rows((of_rows, rows), self.ep_group, receive, send, deferred)
        return received[1], received[0]

    def dispatch_postprocess(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, RowEnds, Tensor]:
        """Rows [R, H] of the local experts sorted by expert, the ends of each expert's rows, and the weights [R]."""
        members, topk = self.routing_map, self.config.moe_router_topk
        rows = members.shape[0] * topk
        waits, self._waits = self._waits, ()
        if self.sizes is not None:
            waits[0]()
            weights = self._of_tensor_ranks(weights, self.sizes)
            members, rows = weights.detach(), self.sizes.rows
        self.order = row_order(members, self.num_local_experts, min(topk, self.num_local_experts))
        if self.sizes is not None:
            waits[1]()  # the tokens arrive while their rows are ordered
            tokens = self._of_tensor_ranks(tokens, self.sizes)
        of_rows, weights_of_rows = rows_of_tokens(tokens, weights, self.order, rows)
        return of_rows, RowEnds(self.order.ends), weights_of_rows

    def _of_tensor_ranks(self, received: Tensor, sizes: _ExchangeSizes) -> Tensor:
        """Rows received by all processes that share the local experts, concatenated."""
        if self.tp_size == 1:
            return received
        gathered: Tensor = gather_from_sequence_parallel_region(
            received, group=self.tp_group, output_split_sizes=sizes.of_tensor_ranks
        )
        return gathered

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums over the local experts of each token; partial sums of tensor-parallel experts are added up."""
        sums = sums_of_rows(hidden_states, self.order)
        if self.sizes is not None and self.tp_size > 1:
            total = reduce_scatter_to_sequence_parallel_region(
                sums.float(), group=self.tp_group, input_split_sizes=self.sizes.of_tensor_ranks
            )
            sums = total.to(hidden_states.dtype)
        return sums

    def token_combine(self, hidden_states: Tensor, *_arguments: Any, **_named: Any) -> Tensor:
        """Send the sums back to the processes of their tokens."""
        if self.sizes is None:
            return hidden_states
        (received,), (wait,) = exchange_rows((hidden_states,), self.ep_group, self.sizes.send, self.sizes.receive)
        wait()
        return received

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Sums over the experts of each token, in the shape of the hidden states."""
        sums = rows if self.sizes is None else sums_of_rows(rows, self.sent)
        return sums.view(self.hidden_shape)


class _ExchangeSizes:
    """Numbers of rows of an exchange on the host; the first access waits for their copy, which began earlier.

    Args:
        counts: int32 on the device, for each expert-parallel rank, then tensor-parallel rank [3, expert-parallel
            processes]: `RowOrder.totals` of the tokens that it sends.
        expert_rank: expert-parallel rank of this process.
        tensor_rank: rank of this process among those that share the local experts.
        tensor_size: number of processes that share the local experts.
    """

    def __init__(self, counts: Tensor, expert_rank: int, tensor_rank: int, tensor_size: int) -> None:
        self._wait = start_host_copy(counts)
        self._expert_rank, self._tensor_rank, self._tensor_size = expert_rank, tensor_rank, tensor_size

    @functools.cached_property
    def _counts(self) -> Tensor:
        """Totals of all ranks, [expert-parallel rank, tensor-parallel rank, 3, receiving expert-parallel rank]."""
        counts = self._wait()
        return counts.view(-1, self._tensor_size, 3, counts.shape[1])

    @functools.cached_property
    def _received(self) -> list[list[list[int]]]:
        """Tokens that each [expert-parallel rank][tensor-parallel rank] sends to this expert-parallel rank, and their
        rows there."""
        received: list[list[list[int]]] = self._counts[:, :, 1:, self._expert_rank].tolist()
        return received

    @functools.cached_property
    def send(self) -> list[int]:
        """Tokens sent to each expert-parallel process."""
        sent: list[int] = self._counts[self._expert_rank, self._tensor_rank, 1].tolist()
        return sent

    @functools.cached_property
    def receive(self) -> list[int]:
        """Tokens received from each expert-parallel process."""
        return [ranks[self._tensor_rank][0] for ranks in self._received]

    @functools.cached_property
    def of_tensor_ranks(self) -> list[int]:
        """Tokens received by each process that shares the local experts."""
        return [sum(ranks[rank][0] for ranks in self._received) for rank in range(self._tensor_size)]

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the local experts."""
        return sum(rows for ranks in self._received for _tokens, rows in ranks)


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
