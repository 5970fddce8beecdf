"""Gemma 3: Gemma's layers with norms of queries and keys, and sliding windows in most layers, whose rotary frequencies
have a base of their own (transformers/models/gemma3)."""

from megatron_wrap.bridge.families.common_keys import need, refuse_unless
from megatron_wrap.bridge.families.gemma import gemma_config, gemma_table, gemma_values
from megatron_wrap.bridge.families.mistral import (
    SLIDING,
    layer_windows,
    layer_windows_config,
    rope_of_kinds,
    rope_of_kinds_config,
    window_rope_values,
)
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig

_DEFAULTS: Config = {"vocab_size": 262208, "max_position_embeddings": 131072}


def _arch_values(config: Config) -> Values:
    refuse_unless(config, attn_logit_softcapping=None, final_logit_softcapping=None)
    config = {"sliding_window": 4096, "rope_local_base_freq": 1e4, **config}
    whole, window = rope_of_kinds(config, base=1e6, window_base=need(config, "rope_local_base_freq"))
    values = gemma_values({**config, "rope_scaling": None, "rope_parameters": whole}, _DEFAULTS)
    windows = layer_windows(config, values["num_layers"], full_every=config.get("sliding_window_pattern") or 6)
    values |= {"qk_layernorm": True, **windows}
    return {**values, **window_rope_values(values, window)}


def _config_values(arch: ArchConfig) -> Values:
    values = {**gemma_config(arch), **layer_windows_config(arch)}
    kinds = rope_of_kinds_config(arch, values)
    # the earlier form, for transformers before 5
    return {**values, **kinds, "rope_local_base_freq": kinds["rope_parameters"][SLIDING]["rope_theta"]}


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", _arch_values, _config_values, gemma_table)
