"""Mistral: Llama with optional sliding-window attention (transformers/models/mistral), windows of some layers in other
families, and the rotary parameters by the kind of a layer that OLMo 3 and Gemma 3 share: layers with a window have
separate frequencies, which are not scaled."""

from __future__ import annotations

from megatron_wrap.bridge.families.common_keys import (
    decoder_config,
    decoder_values,
    every_nth,
    layers_of_kind,
    need,
    refuse_unless,
)
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import window_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel

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


def rope_of_kinds(config: Config, *, base: float, window_base: float) -> tuple[Values, Values]:
    """The rotary parameters of layers without and with a window, from `rope_parameters` by kind (transformers 5), and
    those of layers without one also from `rope_theta` and `rope_scaling` (earlier).

    Args:
        base, window_base: of the frequencies, where config.json has none.
    """
    by_kind = config.get("rope_parameters") or {}
    if set(by_kind) - {FULL, SLIDING}:
        raise UnsupportedModel(f"rope_parameters must have {FULL} and {SLIDING}, not {', '.join(by_kind)}")
    whole, window = (by_kind.get(kind) or {"rope_type": "default"} for kind in (FULL, SLIDING))
    whole = {"rope_theta": config.get("rope_theta", base), **whole, **(config.get("rope_scaling") or {})}
    return whole, {"rope_theta": window_base, **window}


def window_rope_values(values: Config, window: Config) -> Values:
    """Architecture key of the rotary parameters `window` of layers with a window, in addition to the other keys."""
    refuse_unless(window, rope_type="default", type="default", partial_rotary_factor=(None, 1.0))
    scaled = values["use_rope_scaling"] or values["rope_type"] != "rope"
    scaled = scaled or values["rotary_seq_len_interpolation_factor"] is not None
    theta = float(need(window, "rope_theta"))
    if values["window_size"] is None or (theta == values["rotary_base"] and not scaled):
        return {"window_rotary_base": None}
    return {"window_rotary_base": theta}


def rope_of_kinds_config(arch: ArchConfig, values: Config) -> Values:
    """The inverse of both functions, in addition to the other `values` of config.json; layers without a window have the
    earlier form."""
    whole = {"rope_type": "default", **(values["rope_scaling"] or {}), "rope_theta": arch.rotary_base}
    base = arch.rotary_base if arch.window_rotary_base is None else arch.window_rotary_base
    return {"rope_parameters": {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": base}}}


FAMILY = Family("mistral", "MistralForCausalLM", _arch_values, _config_values, llama_table)
