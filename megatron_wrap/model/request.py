"""The argument of model providers, and the size of the vocabulary that they build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_wrap.config.schema.run import RunConfig
    from megatron_wrap.parallel.state import ParallelState


@dataclass(frozen=True)
class ModelRequest:
    """Describes the model chunk that a provider has to build on this process."""

    config: RunConfig
    transformer_config: TransformerConfig
    state: ParallelState
    transformer_engine: bool
    """Whether layers are those of Transformer Engine; False: those of the `torch` implementation."""
    experts_impl: str
    """Implementation of experts: "grouped_mm", "transformer_engine" or "sequential"; meaningless without experts."""
    vocab_size: int
    """Number of ids that the model predicts: the size of the vocabulary without padding, or less."""
    padded_vocab_size: int
    """Global number of rows of the embedding, a multiple of the tensor-parallel size."""
    pre_process: bool
    """Whether the chunk contains the embedding."""
    post_process: bool
    """Whether the chunk contains the output layer."""
    virtual_stage: int | None
    """Index of the chunk on this pipeline stage; None: the pipeline is not interleaved."""
    defers_logits: bool = False
    """Whether the output is `DeferredLogits`, because of `linear_cross_entropy`; only for providers that support it."""


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """The vocabulary size rounded up to a multiple of divisible_by * tensor_parallel_size, as in Megatron-LM
    (megatron/training/tokenizer)."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
