"""Adds the trained rows of `adapter.trainable_token_indices` to a model chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_wrap.bridge.adapters.target_modules import refuse_unknown_tokens
from megatron_wrap.bridge.mapping.family import ADAPTER, EMBEDDING, HEAD
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.parallel.state import ParallelState


def add_token_rows(
    chunk: Any, indices: Mapping[str, tuple[int, ...]], config: RunConfig, parallel: ParallelState, vocab_size: int
) -> None:
    """Add the rows to a bare model chunk whose weights are set. The rows of an embedding are in its sibling
    `word_embeddings_adapter`, with tied weights also the rows of an output layer in the same chunk. Collective over
    tensor-parallel ranks.

    Args:
        indices: global name of a weight -> its rows, from `trained_rows`.

    Raises:
        ConfigError: an index is not in the vocabulary.
    """
    from megatron_wrap.nn.adapters.embedding_rows import EmbeddingRows
    from megatron_wrap.nn.adapters.lora import TRAINED

    refuse_unknown_tokens(indices, vocab_size)
    tied = not config.arch.untie_embeddings_and_output_weights and not derived.has_value_head(config)
    over_stages = tied and parallel.pp.size > 1
    sequence_parallel = derived.sequence_parallel(config.parallel) and parallel.tp.size > 1

    def rows(weight: torch.Tensor, name: str, is_copy: bool = False) -> EmbeddingRows:
        return EmbeddingRows(
            weight,
            indices[name],
            parallel.tp.rank,
            sequence_parallel,
            TRAINED,
            tied_over_stages=over_stages,
            is_copy=is_copy,
        )

    if chunk.pre_process and EMBEDDING in indices:
        embedding = chunk.embedding.word_embeddings
        of_embedding = rows(embedding.weight, EMBEDDING)
        of_embedding.beside_embedding(embedding)
        chunk.embedding.add_module(f"word_embeddings{ADAPTER}", of_embedding)
        if tied and chunk.post_process:
            of_embedding.beside_output_layer(chunk.output_layer)
    name = EMBEDDING if tied else HEAD
    if chunk.post_process and name in indices and not (tied and chunk.pre_process):
        of_output = rows(chunk.output_layer.weight, name, is_copy=tied)
        of_output.beside_output_layer(chunk.output_layer)
        chunk.add_module(f"output_layer{ADAPTER}", of_output)
