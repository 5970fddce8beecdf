"""What the engine asks a model provider for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_wrap.config.schema import RunConfig
    from megatron_wrap.parallel.state import ParallelState


@dataclass(frozen=True)
class ModelRequest:
    """What a provider is asked for: one chunk of the model on this process."""

    config: RunConfig
    transformer_config: TransformerConfig
    state: ParallelState
    transformer_engine: bool
    """Layers from Transformer Engine; else the `torch` implementation."""
    vocab_size: int
    """Entries of the vocabulary, without padding."""
    padded_vocab_size: int
    """Rows of the embedding, a multiple of the tensor-parallel size."""
    pre_process: bool
    """The chunk holds the embedding."""
    post_process: bool
    """The chunk holds the output layer."""
    virtual_stage: int | None
    """Place of the chunk among this stage's, None where the pipeline is not interleaved."""
