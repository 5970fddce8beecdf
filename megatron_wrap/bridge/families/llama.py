"""Llama 1 to 3.2, and models of the same architecture (transformers/models/llama)."""

from collections.abc import Mapping
from typing import Any

from megatron_wrap.bridge.families.decoder import decoder_config, decoder_values, llama_table
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel


def _arch_values(config: Mapping[str, Any]) -> dict[str, Any]:
    biases = bool(config.get("attention_bias", False))
    if biases != bool(config.get("mlp_bias", False)):
        raise UnsupportedModel(
            f"attention_bias is {biases} and mlp_bias is {not biases}, but Megatron-Core has biases in both or neither"
        )
    return {**decoder_values(config, tied=False), "add_bias_linear": biases}


def _config_values(arch: ArchConfig) -> dict[str, Any]:
    return {**decoder_config(arch), **dict.fromkeys(("attention_bias", "mlp_bias"), arch.add_bias_linear)}


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=llama_table,
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
