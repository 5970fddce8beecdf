"""The architecture of a model with all of its sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig


def with_derived_sizes(arch: ArchConfig, seq_length: int, vocab_size: int | None = None) -> ArchConfig:
    """The architecture with derived values instead of null.

    Args:
        seq_length: of the run, in tokens; for max_position_embeddings.
        vocab_size: of the model; None: that of `arch`.
    """
    patterns: dict[str, Any] = {}
    if arch.num_experts is not None:
        patterns["moe_layer_freq"] = derived.moe_layer_pattern(arch)
        patterns["moe_ffn_hidden_size"] = derived.moe_ffn_hidden_size(arch)
    if arch.experimental_attention_variant is not None:
        patterns["linear_attention_freq"] = derived.linear_layer_pattern(arch)
    return dataclasses.replace(
        arch,
        **patterns,
        ffn_hidden_size=derived.ffn_hidden_size(arch),
        num_query_groups=derived.num_query_groups(arch),
        kv_channels=derived.kv_channels(arch),
        max_position_embeddings=derived.max_position_embeddings(arch, seq_length),
        vocab_size=arch.vocab_size if vocab_size is None else vocab_size,
    )
