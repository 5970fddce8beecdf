"""Ministral: Mistral with sliding windows in some layers (transformers/models/ministral)."""

from megatron_wrap.bridge.families.common_keys import decoder_config, decoder_values
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.families.mistral import layer_windows, layer_windows_config
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig


def _arch_values(config: Config) -> Values:
    config = {"sliding_window": 4096, **config}  # transformers' default
    values = decoder_values(config, tied=False)
    return {**values, **layer_windows(config, values["num_layers"], full_every=values["num_layers"] + 1)}


def _config_values(arch: ArchConfig) -> Values:
    return {**decoder_config(arch), **layer_windows_config(arch)}


FAMILY = Family("ministral", "MinistralForCausalLM", _arch_values, _config_values, llama_table)
