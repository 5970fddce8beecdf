"""Megatron-Core's MoE layer with `SortingDispatcher`, and shared experts that are computed during its exchange."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from megatron_wrap.nn.experts.dispatcher import SortingDispatcher, can_sort_on_device
from megatron_wrap.nn.experts.gating import can_gate


class GroupedMoELayer(MoELayer):
    """A layer whose experts are `GroupedExperts`. Arguments: those of `MoELayer`.

    With expert parallelism, the shared experts are computed after the sizes of the exchange have been sent, so that the
    wait for these is hidden, and on a GPU on a stream of their own, beside the exchange. In the backward pass the
    gradient of the experts' first weight is computed beside the exchange of the tokens' gradients.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._defers_shared_experts = False
        self._input_of_shared_experts: Tensor | None = None
        self._shared: tuple[Tensor, torch.cuda.Stream | None] | None = None
        if can_sort_on_device(self.config):
            self.token_dispatcher = SortingDispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=self.config,
                pg_collection=named.get("pg_collection") or get_default_pg_collection(),
            )
            self._defers_shared_experts = self.use_shared_expert and self.token_dispatcher.ep_size > 1

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """See `MoELayer`; None if they are computed later."""
        if self._defers_shared_experts:
            self._input_of_shared_experts = hidden_states
            return None
        shared: Tensor | None = super().shared_experts_compute(hidden_states)
        return shared

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> Any:
        """See `MoELayer`."""
        self._defer_weight_gradient()
        hidden, self._input_of_shared_experts = self._input_of_shared_experts, None
        if hidden is not None:
            self._shared = self._compute_beside_the_exchange(hidden)
        return super().dispatch(hidden_states, probs)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Any:
        """See `MoELayer`."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared_expert_output, stream = shared
            if stream is not None:
                current = torch.cuda.current_stream()
                current.wait_stream(stream)
                shared_expert_output.record_stream(current)
        return super().postprocess(output, shared_expert_output)

    def _defer_weight_gradient(self) -> None:
        dispatcher, linear = self.token_dispatcher, self.experts.linear_fc1
        exchanges = isinstance(dispatcher, SortingDispatcher) and dispatcher.ep_size > 1
        if exchanges and linear.weight.requires_grad and torch.is_grad_enabled():
            dispatcher.compute_beside_exchange(linear.defer_gradient())

    def _compute_beside_the_exchange(self, hidden: Tensor) -> tuple[Tensor, torch.cuda.Stream | None]:
        """The output of the shared experts, and the stream that computes it, None: the current one."""
        router = self.router
        # Products of Transformer Engine on two streams would share their workspace, and so they would with its logits.
        # Tensor-parallel shared experts have exchanges of their own.
        is_alone = can_gate(hidden, router.weight, router.bias, self.config.moe_router_dtype)
        if not is_alone or self.config.tensor_model_parallel_size > 1:
            return super().shared_experts_compute(hidden), None
        stream = _side_stream(hidden.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            shared = super().shared_experts_compute(hidden)
        hidden.record_stream(stream)
        return shared, stream


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of shared experts, one for all layers: each stream has memory of its own."""
    return torch.cuda.Stream(device)
