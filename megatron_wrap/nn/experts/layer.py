"""Megatron-Core's MoE layer with `SortingDispatcher`, and with computation during its exchange."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from megatron_wrap.nn.experts.dispatcher import SortingDispatcher, can_sort_on_device


class GroupedMoELayer(MoELayer):
    """A layer whose experts are `GroupedExperts`. Arguments: those of `MoELayer`.

    With expert parallelism, the shared experts are computed during the exchange of the tokens, and in the backward pass
    the gradient of the experts' first weight during the exchange of the tokens' gradients.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._defers_shared_experts = False
        self._input_of_shared_experts: Tensor | None = None
        self._shared: Tensor | None = None
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
        dispatched = super().dispatch(hidden_states, probs)
        hidden, self._input_of_shared_experts = self._input_of_shared_experts, None
        if hidden is not None:
            self._shared = super().shared_experts_compute(hidden)
        return dispatched

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Any:
        """See `MoELayer`."""
        shared, self._shared = self._shared, None
        return super().postprocess(output, shared_expert_output if shared is None else shared)

    def _defer_weight_gradient(self) -> None:
        dispatcher, linear = self.token_dispatcher, self.experts.linear_fc1
        exchanges = isinstance(dispatcher, SortingDispatcher) and dispatcher.ep_size > 1
        if exchanges and linear.weight.requires_grad and torch.is_grad_enabled():
            dispatcher.compute_beside_exchange(linear.defer_gradient())
