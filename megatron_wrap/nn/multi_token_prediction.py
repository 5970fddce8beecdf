"""Layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 23).

Layer k joins the hidden state of position t with the embedding of token t + k, and its transformer layer predicts token
t + k + 1 through the model's own output layer. Megatron-Core's own layers (transformer/multi_token_prediction.py) shift
tokens and labels inside the model, over ranks, and average the loss over the tokens of each rank; these take shifted
tokens and return hidden states, so the loss of a step is normalized as every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_wrap.nn.experts.router import Router


class PredictionLayer(MegatronModule):
    """One layer for multi-token prediction.

    Args:
        config: Megatron-Core's.
        layer_spec: spec of the transformer layer.
        norm: class of the norms, built with config, hidden_size and eps.
        depth: k, from 1.
        virtual_stage: virtual pipeline stage of the chunk that contains the layer.
        groups: Megatron-Core's process groups.
    """

    def __init__(
        self, config: Any, layer_spec: Any, norm: type, depth: int, virtual_stage: int | None, groups: Any
    ) -> None:
        super().__init__(config=config)
        self.groups = groups
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm, self.hnorm = norm(**sizes), norm(**sizes)
        self.eh_proj = ColumnParallelLinear(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
            tp_group=groups.tp,
        )
        # the layer adds the number of layers before its chunk
        before = get_transformer_layer_offset(config, vp_stage=virtual_stage)
        self.transformer_layer = build_module(
            layer_spec,
            config=config,
            layer_number=config.num_layers + depth - before,
            vp_stage=virtual_stage,
            pg_collection=groups,
        )
        self.final_layernorm = norm(**sizes)
        for module in self.modules():
            if isinstance(module, Router):
                module.leave_decoder()

    def forward(self, embedded: Tensor, hidden_states: Tensor, **inputs: Any) -> Tensor:
        """Hidden states after the final norm, [S/cp, B, H], with sequence parallelism [S/cp/tp, B, H], like both
        arguments.

        Args:
            embedded: embeddings of the tokens ahead.
            hidden_states: hidden states of the previous layer, after its final norm.
            inputs: further inputs of the transformer layer.
        """
        compute: Callable[[Tensor, Tensor], Tensor] = partial(self._compute, **inputs)
        if self.config.recompute_granularity == "full" and self.training and torch.is_grad_enabled():
            return tensor_parallel.checkpoint(
                compute, self.config.distribute_saved_activations, embedded, hidden_states
            )
        return compute(embedded, hidden_states)

    def _compute(self, embedded: Tensor, hidden_states: Tensor, **inputs: Any) -> Tensor:
        sequence_parallel = self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if sequence_parallel else nullcontext():
            joined, _ = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden_states)], dim=-1))
            joined = gather_from_tensor_model_parallel_region(joined, group=self.groups.tp)
            if sequence_parallel:
                joined = scatter_to_sequence_parallel_region(joined, group=self.groups.tp)
            output, _ = self.transformer_layer(hidden_states=joined, **inputs)
        normalized: Tensor = self.final_layernorm(output)
        return normalized


class PredictionBlock(MegatronModule):
    """All layers for multi-token prediction, on the last pipeline stage. Other arguments are those of
    `PredictionLayer`.

    Args:
        num_layers: number of layers (D).
    """

    def __init__(
        self, config: Any, layer_spec: Any, norm: type, num_layers: int, virtual_stage: int | None, groups: Any
    ) -> None:
        super().__init__(config=config)
        self.layers = torch.nn.ModuleList(
            PredictionLayer(config, layer_spec, norm, depth, virtual_stage, groups)
            for depth in range(1, num_layers + 1)
        )

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden_states: Tensor, embedding: Any, **inputs: Any
    ) -> Sequence[Tensor]:
        """The hidden states of each layer, in the shape of `hidden_states`.

        Args:
            input_ids: [B, D, S/cp], the tokens ahead of each position, for each layer.
            position_ids: [B, S/cp].
            hidden_states: hidden states of the decoder, after its final norm.
            embedding: the model's embedding.
            inputs: further inputs of the transformer layers.
        """
        states, layers = [], cast(Iterable[Any], self.layers)
        for layer, tokens in zip(layers, input_ids.unbind(dim=1), strict=True):
            embedded = embedding(input_ids=tokens, position_ids=position_ids)
            hidden_states = layer(embedded, hidden_states, **inputs)
            states.append(hidden_states)
        return states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The shards of each layer under its own name, `PREFIX.layers.N.`."""
        state: dict[str, Any] = {}
        for number, layer in enumerate(cast(Iterable[Any], self.layers)):
            state |= layer.sharded_state_dict(f"{prefix}layers.{number}.", sharded_offsets, metadata)
        return state


class TiedEmbedding(LanguageModelEmbedding):
    """The embedding on the last pipeline stage, whose weight is that of the tied output layer.

    Args:
        weight: weight of the output layer.
        sizes: arguments of the base class.
    """

    def __init__(self, weight: Any, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.word_embeddings.register_parameter("weight", weight)
        # two layers use it: what the output layer returns for a gradient that it has added to the buffer must be zero
        weight.zero_out_wgrad = True


def mark_copied_embedding(weight: Any, is_copy: bool) -> None:
    """Mark the embedding's weight on the first or on the last pipeline stage (`is_copy`), as Megatron-Core marks those
    of its own layers (language_module.py, setup_embeddings_and_output_layer): the copy does not count in the gradient
    norm, and the distributed optimizer splits both alike (distributed/param_and_grad_buffer.py)."""
    weight.is_embedding_or_output_parameter = weight.shared_embedding = True
    weight.shared = is_copy
