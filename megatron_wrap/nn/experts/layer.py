"""Megatron-Core's MoE layer with `SortingDispatcher`, and with computation during its exchange; and a transformer layer
with experts whose part before the exchange of tokens is a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_layer import MoETransformerLayer
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


class PartlyCapturedLayer(MoETransformerLayer):
    """A layer whose attention, norms, router and order of the tokens to be sent are one CUDA graph in training
    (`cuda_graph_impl: local`). The rest is not captured, because the number of tokens that a process receives is known
    only during the pass.

    With expert parallelism the host waits for these numbers in each layer. Without the graph, it then queues the next
    layer's attention and router one operation at a time, possibly later than the device needs them.

    Arguments: those of `TransformerLayer`, with a spec whose MLP is a `GroupedMoELayer` that sorts on the device.
    """

    mlp: GroupedMoELayer
    is_captured_in_parts = True
    """Whether a CUDA graph captures only a part of the layer, see `platform/megatron_core/graphs.py`."""

    def create_mcore_cudagraph_manager(self, config: Any) -> None:
        """See `GraphableMegatronModule`; Megatron-Core calls it in the constructor."""
        from megatron.core.transformer.cuda_graphs import CudaGraphManager

        self.manager_of_part = CudaGraphManager(config, self, function_name="before_exchange")

    def _should_call_local_cudagraph(self, *_arguments: Any, **_named: Any) -> bool:
        return False

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, None]:
        """See `TransformerLayer`."""
        if not self.training:
            result: tuple[Tensor, None] = super().forward(*arguments, **named)
            return result
        residual, *prepared = self.before_exchange(*arguments, **named)
        output = self.mlp.from_exchange_on(prepared, shape=residual.shape)
        return self._forward_post_mlp(output, residual), None

    def before_exchange(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        """The residual [s, b, H] after attention, and the tensors of `GroupedMoELayer.until_exchange`."""
        hidden, _context = self._forward_attention(*arguments, **named)
        normalized, residual = self._forward_pre_mlp_layernorm(hidden), hidden
        if isinstance(normalized, tuple):  # a norm that returns its input
            normalized, residual = normalized
        if self.config.fp32_residual_connection:
            residual = residual.float()
        return residual, *self.mlp.until_exchange(normalized, named.get("padding_mask"))
