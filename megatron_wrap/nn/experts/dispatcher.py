"""Brings tokens to the processes of their experts and back, with rows that are sorted on the device.

Replaces Megatron-Core's all-to-all dispatcher, which waits for the GPU in each layer even if all experts are on one
process, sends a row for each expert of a token, and splits and joins one chunk of rows for each expert and sender. Here
a process is sent each token once, whatever the number of its experts that process the token; nothing waits if neither
experts nor tokens are distributed, else one wait for the sizes of the exchange is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_wrap.nn.experts.exchange import exchange_rows
from megatron_wrap.nn.experts.permutation import RowOrder, row_order, rows_of_tokens, sums_of_rows
from megatron_wrap.nn.experts.products import DeferredGradient, RowEnds
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
    """See `MoEAlltoAllTokenDispatcher` for the arguments.

    One forward pass calls, in this order, `dispatch_preprocess`, `token_dispatch`, `dispatch_postprocess`,
    `combine_preprocess`, `token_combine` and `combine_postprocess`. T is the number of this process's tokens, R the
    number of rows of the local experts, L the number of local experts.
    """

    sent: RowOrder
    """Of this process's tokens by the process to which they are sent, without its number of rows."""
    order: RowOrder
    """Of the tokens that are here by local expert."""
    sizes: _ExchangeSizes | None = None
    """None: nothing is exchanged."""
    _numbers: Tensor
    """Of `sizes`, on the device."""
    _deferred: DeferredGradient | None = None
    _waits: tuple[Callable[[], object], ...] = ()

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [T, H] of the hidden states [..., H], and the weights [T, experts] of their experts, negative where an
        expert does not process a token, if they are exchanged.

        Args:
            routing_map: bool [T, experts].
            probs: [T, experts], the router's weights, at least 0.
        """
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        if self._exchanges:
            by_process = routing_map.view(-1, self.ep_size, self.num_local_experts).any(dim=-1)
            self._numbers = self._exchange_numbers(by_process, routing_map)
            self.sent = row_order(by_process, min(self.config.moe_router_topk, self.ep_size))
            probs = probs.masked_fill(~routing_map, -1.0)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), probs

    @property
    def prepared(self) -> tuple[Tensor, ...]:
        """What `dispatch_preprocess` has left for the phases that follow."""
        return (self._numbers, *self.sent) if self._exchanges else (self.routing_map,)

    def continue_with(self, prepared: Sequence[Tensor], hidden_shape: torch.Size) -> None:
        """Continue after a `dispatch_preprocess` that a CUDA graph has replayed.

        Args:
            prepared: its `prepared`.
            hidden_shape: of its hidden states.
        """
        self.hidden_shape = hidden_shape
        if self._exchanges:
            self._numbers, self.sent = prepared[0], RowOrder(*prepared[1:])
        else:
            (self.routing_map,) = prepared

    @property
    def _exchanges(self) -> bool:
        return self.ep_size > 1 or self.tp_size > 1

    def compute_beside_exchange(self, deferred: DeferredGradient) -> None:
        """Compute a gradient in the backward pass of the next `token_dispatch`, during its exchange."""
        self._deferred = deferred

    def token_dispatch(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that local experts process, and their weights [tokens, L] at these. If they are exchanged, nothing
        but `dispatch_postprocess` may read them."""
        if not self._exchanges:
            return tokens, weights
        self.sizes = _ExchangeSizes(self._numbers, self.ep_size)
        send, receive = self.sizes.send, self.sizes.receive
        rows_sent = sum(send)
        self.sent = self.sent._replace(tokens=self.sent.tokens[:rows_sent], cells=self.sent.cells[:rows_sent])
        rows = rows_of_tokens(tokens, self.sent)
        of_rows = self.sent.weights_of_rows(weights.view(-1, self.ep_size, self.num_local_experts))
        deferred, self._deferred = self._deferred, None
        received, wait_for_rows = exchange_rows(rows, self.ep_group, receive, send, deferred)
        of_received, wait_for_weights = exchange_rows(of_rows, self.ep_group, receive, send)
        self._waits = (wait_for_rows, wait_for_weights)
        return received, of_received

    def dispatch_postprocess(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, RowEnds, Tensor]:
        """Rows [R, H] of the local experts sorted by expert, where those of each end, and the weights [R]."""
        for wait in self._waits:
            wait()
        self._waits = ()
        if self.sizes is not None and self.tp_size > 1:
            sizes = self.sizes.of_tensor_ranks
            tokens = gather_from_sequence_parallel_region(tokens, group=self.tp_group, output_split_sizes=sizes)
            weights = gather_from_sequence_parallel_region(weights, group=self.tp_group, output_split_sizes=sizes)
        most = min(self.config.moe_router_topk, self.num_local_experts)
        if self.sizes is None:
            self.order = row_order(self.routing_map, most)
        else:  # a weight that is not a number is one of a row, whose loss is then refused
            self.order = row_order(~(weights.detach() < 0), most, self.sizes.rows)
        rows = rows_of_tokens(tokens, self.order)
        return rows, RowEnds(self.order.ends), self.order.weights_of_rows(weights)

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
        received, wait = exchange_rows(hidden_states, self.ep_group, self.sizes.send, self.sizes.receive)
        wait()
        return received

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Sums over the experts of each token, in the shape of the hidden states."""
        sums = rows if self.sizes is None else sums_of_rows(rows, self.sent)
        return sums.view(self.hidden_shape)

    def _exchange_numbers(self, by_process: Tensor, routing_map: Tensor) -> Tensor:
        """Gather how many tokens each process sends to each, and how many rows each expert has: those of
        `_ExchangeSizes`.

        Args:
            by_process: bool [T, expert-parallel processes]: whether a token is sent to a process.
        """
        local = torch.cat([by_process.sum(dim=0), routing_map.sum(dim=0)])
        everywhere = gather_from_sequence_parallel_region(local, group=self.tp_ep_group)
        everywhere = everywhere.view(self.ep_size, self.tp_size, -1)  # [expert-parallel rank, tensor-parallel rank, :]
        first = self.ep_size + self.local_expert_indices[0]
        of_local_experts = everywhere[:, :, first : first + self.num_local_experts].sum()
        received = everywhere[:, :, self.ep_group.rank()]
        numbers = [local[: self.ep_size], received[:, self.tp_rank], received.sum(dim=0), of_local_experts[None]]
        return torch.cat(numbers)


class _ExchangeSizes:
    """Numbers of rows of an exchange on the host; the first access waits for their copy, which began earlier.

    Args:
        numbers: integers on the device: tokens sent to each of the `processes`, tokens received from each, tokens
            received by each tensor-parallel process, rows of the local experts.
    """

    def __init__(self, numbers: Tensor, processes: int) -> None:
        self._processes = processes
        self._wait = start_host_copy(numbers)
        self._values: list[int] = []

    @property
    def values(self) -> list[int]:
        """All numbers."""
        if not self._values:
            self._values = self._wait().tolist()
        return self._values

    @property
    def send(self) -> list[int]:
        """Tokens sent to each expert-parallel process."""
        return self.values[: self._processes]

    @property
    def receive(self) -> list[int]:
        """Tokens received from each."""
        return self.values[self._processes : 2 * self._processes]

    @property
    def of_tensor_ranks(self) -> list[int]:
        """Tokens received by each process that shares the local experts."""
        return self.values[2 * self._processes : -1]

    @property
    def rows(self) -> int:
        """Rows of the local experts."""
        return self.values[-1]
