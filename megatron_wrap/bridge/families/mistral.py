"""Mistral: Llama with optional sliding-window attention (transformers/models/mistral)."""

from collections.abc import Mapping
from typing import Any

from megatron_wrap.bridge.families.decoder import decoder_config, decoder_values, llama_table
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.config.schema.model import ArchConfig


def window_values(window: int | None) -> dict[str, Any]:
    """`sliding_window` includes the token itself; Megatron-Core's window_size = (left, right) counts its neighbors."""
    return {"window_size": None if window is None else [window - 1, 0]}


def window_config(arch: ArchConfig) -> dict[str, Any]:
    """The inverse of `window_values`."""
    window = arch.window_size
    return {"sliding_window": None if window is None else window[0] + 1}


def _arch_values(config: Mapping[str, Any]) -> dict[str, Any]:
    # 4096 is transformers' default, which the first release's config.json omits
    return {**decoder_values(config, tied=False), **window_values(config.get("sliding_window", 4096))}


def _config_values(arch: ArchConfig) -> dict[str, Any]:
    return {**decoder_config(arch), **window_config(arch)}


FAMILY = Family("mistral", "MistralForCausalLM", _arch_values, _config_values, llama_table)
