"""Mistral: Llama with optional sliding-window attention (transformers/models/mistral)."""

from megatron_wrap.bridge.families.common_keys import decoder_config, decoder_values, every_nth, layers_of_kind
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import window_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig

SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in `layer_types`."""


def window_values(window: int | None) -> Values:
    """Architecture keys of `sliding_window`, which includes the token itself; Megatron-Core's window_size = (left,
    right) counts its neighbors."""
    return {"window_size": None if window is None else [window - 1, 0]}


def window_config(arch: ArchConfig) -> Values:
    """The inverse of `window_values`."""
    window = arch.window_size
    return {"sliding_window": None if window is None else window[0] + 1}


def layer_windows(config: Config, layers: int, *, full_every: int) -> Values:
    """Architecture keys of windows of `sliding_window` tokens in some layers, from `layer_types`.

    Args:
        full_every: without `layer_types`, each layer whose number, from 1, is a multiple of it attends to all tokens.
    """
    default = [FULL if number % full_every == 0 else SLIDING for number in range(1, layers + 1)]
    full = layers_of_kind(config, "layer_types", (FULL, SLIDING), default)
    if all(full) or config.get("sliding_window") is None:
        return {"window_size": None, "window_attn_skip_freq": None}
    skipped = None if not any(full) else every_nth(full) or [1 - each for each in full]
    return {**window_values(config["sliding_window"]), "window_attn_skip_freq": skipped}


def layer_windows_config(arch: ArchConfig) -> Values:
    """The inverse of `layer_windows`."""
    return {
        **window_config(arch),
        "layer_types": [SLIDING if window else FULL for window in window_layer_pattern(arch)],
    }


def _arch_values(config: Config) -> Values:
    # 4096 is transformers' default, which the first release's config.json omits
    return {**decoder_values(config, tied=False), **window_values(config.get("sliding_window", 4096))}


def _config_values(arch: ArchConfig) -> Values:
    return {**decoder_config(arch), **window_config(arch)}


FAMILY = Family("mistral", "MistralForCausalLM", _arch_values, _config_values, llama_table)
