"""Qwen 2 and 2.5: Llama with biases in the query, key and value projections (transformers/models/qwen2)."""

from megatron_wrap.bridge.families.common_keys import decoder_config, decoder_values
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel


def refuse_windows(config: Config) -> None:
    """Refuse Qwen's sliding window, which applies to some layers only; no published model enables it.

    Raises:
        UnsupportedModel: it is enabled.
    """
    kinds = set(config.get("layer_types") or ())
    if config.get("use_sliding_window", False) or "sliding_attention" in kinds:
        raise UnsupportedModel("use_sliding_window is true, but windows that differ between layers are not supported")


def _arch_values(config: Config) -> Values:
    refuse_windows(config)
    return {**decoder_values(config, tied=False), "add_qkv_bias": True}


def _config_values(arch: ArchConfig) -> Values:
    return {**decoder_config(arch), "use_sliding_window": False}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _arch_values, _config_values, llama_table)
