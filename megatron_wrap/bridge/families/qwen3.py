"""Qwen 3: Llama with norms of queries and keys and an explicit head size (transformers/models/qwen3)."""

from megatron_wrap.bridge.families.common_keys import decoder_config, decoder_values, refuse_unless
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.families.qwen2 import refuse_windows
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig


def _arch_values(config: Config) -> Values:
    refuse_windows(config)
    refuse_unless(config, attention_bias=False)
    # transformers' default of head_dim is 128, independent of the hidden size
    values = decoder_values({"head_dim": 128, **config}, tied=False)
    return {**values, "qk_layernorm": True}


def _config_values(arch: ArchConfig) -> Values:
    return {**decoder_config(arch), "attention_bias": False, "use_sliding_window": False}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _arch_values, _config_values, llama_table)
