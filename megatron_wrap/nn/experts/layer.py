"""Megatron-Core's MoE layer with `SortingDispatcher`, and with computation during its exchange."""

from __future__ import annotations

from collections.abc import Sequence
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

    def until_exchange(self, hidden_states: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, ...]:
        """The first part of the forward pass, without shared experts, in which nothing waits for the device. Returns
        tokens [T, H], the weights of their experts [T, experts], and the tensors of `SortingDispatcher.prepared`.

        Args:
            hidden_states: [s, b, H].
            padding_mask: bool [b, s], True on padding.
        """
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        probs, routing_map = self.route(hidden_states, mask)
        tokens, weights = self.preprocess(hidden_states, probs, routing_map)
        return tokens, weights, *self.token_dispatcher.prepared

    def from_exchange_on(self, prepared: Sequence[Tensor], shape: torch.Size) -> tuple[Tensor, None]:
        """The second part of the forward pass: the output [s, b, H], and None for the bias.

        Args:
            prepared: result of `until_exchange`.
            shape: shape of its hidden states.
        """
        tokens, weights, *of_dispatcher = prepared
        self.token_dispatcher.continue_with(of_dispatcher, shape)
        shared = self.shared_experts_compute(tokens.view(shape))
        output, _bias = self.routed_experts_compute(*self.dispatch(tokens, weights))
        return self.postprocess(self.combine(output), shared), None

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
