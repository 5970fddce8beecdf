"""Megatron-Core's all-to-all dispatcher with rows that are sorted on the device.

Megatron-Core's waits for the GPU in each layer even if all experts are on one process, and splits and joins one chunk
of rows for each expert and sender. Here nothing waits if neither experts nor tokens are distributed, else one wait for
the sizes of the exchange is left.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_wrap.nn.experts.permutation import RowOrder, chunk_order, reorder, row_order, rows_of_tokens, sums_of_rows


def can_sort_on_device(config: Any) -> bool:
    """Whether every token has `moe_router_topk` rows and the exchange is a plain all-to-all, as `SortingDispatcher`
    needs."""
    dropless = config.moe_expert_capacity_factor is None and not config.moe_router_padding_for_quantization
    return config.moe_token_dispatcher_type == "alltoall" and dropless and not config.moe_shared_expert_overlap


class SortingDispatcher(MoEAlltoAllTokenDispatcher):
    """Brings the tokens of this process to their experts and back; see `MoEAlltoAllTokenDispatcher` for the arguments.

    One forward pass calls, in this order, `dispatch_preprocess`, `token_dispatch`, `dispatch_postprocess`,
    `combine_preprocess`, `token_combine` and `combine_postprocess`.
    """

    order: RowOrder
    """Of the tokens of this process."""
    local_counts: Tensor
    """int64 [local experts] on the device: the rows of each."""
    chunk_sizes: Tensor | None = None
    """int64 [senders, local experts] on the device: rows from each process to each local expert."""
    received_order: tuple[Tensor, Tensor] | None = None
    """Of the rows from several senders; see `chunk_order`."""

    @property
    def is_distributed(self) -> bool:
        """Whether rows of several processes meet at an expert."""
        return bool(self.ep_size > 1 or self.tp_size > 1)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T * k, H] by expert of hidden states [..., H] with T tokens, and the weight [T * k] of each.

        Args:
            routing_map: bool [T, experts].
            probs: [T, experts], the router's weights.
        """
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        if self.is_distributed:
            self.tokens_per_expert = self.local_counts = self.preprocess(routing_map)
            sizes = self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else None
            self.chunk_sizes = sizes
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        else:
            self.local_counts = routing_map.sum(dim=0)
        self.order = row_order(routing_map, self.config.moe_router_topk)
        return rows_of_tokens(tokens, self.order), self.order.weights_of_rows(probs)

    def token_dispatch(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange the rows and their weights over expert-parallel processes."""
        return super().token_dispatch(rows, weights) if self.is_distributed else (rows, weights)

    def dispatch_postprocess(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the local experts sorted by expert, the number of rows of each, and the weights of the rows."""
        if self.tp_size > 1:
            sizes = self._sizes_of_tensor_ranks()
            rows = gather_from_sequence_parallel_region(rows, group=self.tp_group, output_split_sizes=sizes)
            weights = gather_from_sequence_parallel_region(weights, group=self.tp_group, output_split_sizes=sizes)
        self.received_order = None
        if self.is_distributed and self.chunk_sizes is not None:
            self.received_order = chunk_order(self.chunk_sizes, rows.shape[0])
            rows, weights = reorder(rows, *self.received_order), reorder(weights, *self.received_order)
        return rows, self.local_counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' outputs in the order in which their inputs came; partial sums of tensor-parallel experts are
        added up."""
        if self.received_order is not None:
            present, new = self.received_order
            hidden_states = reorder(hidden_states, new, present)
        if self.tp_size > 1:
            sums = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype), group=self.tp_group, input_split_sizes=self._sizes_of_tensor_ranks()
            )
            hidden_states = sums.to(hidden_states.dtype)
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """Send the outputs back to the processes of their tokens."""
        return super().token_combine(hidden_states, *arguments, **named) if self.is_distributed else hidden_states

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Sums over the experts of each token, in the shape of the hidden states."""
        return sums_of_rows(rows, self.order).view(self.hidden_shape)

    def _sizes_of_tensor_ranks(self) -> Any:
        return None if self.output_splits_tp is None else self.output_splits_tp.tolist()
