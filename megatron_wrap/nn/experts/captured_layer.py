"""A transformer layer with experts, whose part before the exchange of tokens is a CUDA graph."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import MoETransformerLayer
from torch import Tensor

from megatron_wrap.nn.experts.layer import GroupedMoELayer


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
