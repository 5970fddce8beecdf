"""Adds the trained rows of `adapter.trainable_token_indices` to a model chunk."""

from __future__ import annotations

from typing import Any

import torch

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.bridge.mapping.adapter_targets import ADAPTER
from megatron_wrap.bridge.mapping.token_rows import EMBEDDING, refuse_unknown_tokens, trained_rows
from megatron_wrap.bridge.mapping.value_model import HEAD
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.parallel.state import ParallelState


def add_token_rows(chunk: Any, config: RunConfig, parallel: ParallelState, vocab_size: int) -> None:
    """Add the rows to a bare model chunk whose weights are set. The rows of an embedding are in its sibling
    `word_embeddings_adapter`, with tied weights also the rows of an output layer in the same chunk. Collective over
    tensor-parallel ranks.

    Raises:
        ConfigError: as `trained_rows`, or an index is not in the vocabulary.
    """
    from megatron_wrap.nn.adapters.embedding_rows import EmbeddingRows
    from megatron_wrap.nn.adapters.lora import TRAINED

    hf_format = export_format(config, vocab_size)
    wanted = trained_rows(hf_format.family.parameters(hf_format.arch), config.adapter)
    refuse_unknown_tokens(wanted, vocab_size)
    tied = not config.arch.untie_embeddings_and_output_weights and not derived.has_value_head(config)
    over_stages = tied and parallel.pp.size > 1
    sequence_parallel = derived.sequence_parallel(config.parallel) and parallel.tp.size > 1

    def rows(weight: torch.Tensor, name: str, is_copy: bool = False) -> EmbeddingRows:
        return EmbeddingRows(
            weight,
            wanted[name],
            parallel.tp.rank,
            sequence_parallel,
            TRAINED,
            tied_over_stages=over_stages,
            is_copy=is_copy,
        )

    if chunk.pre_process and EMBEDDING in wanted:
        embedding = chunk.embedding.word_embeddings
        of_embedding = rows(embedding.weight, EMBEDDING)
        of_embedding.beside_embedding(embedding)
        chunk.embedding.add_module(f"word_embeddings{ADAPTER}", of_embedding)
        if tied and chunk.post_process:
            of_embedding.beside_output_layer(chunk.output_layer)
    name = EMBEDDING if tied else HEAD
    if chunk.post_process and name in wanted and not (tied and chunk.pre_process):
        of_output = rows(chunk.output_layer.weight, name, is_copy=tied)
        of_output.beside_output_layer(chunk.output_layer)
        chunk.add_module(f"output_layer{ADAPTER}", of_output)
