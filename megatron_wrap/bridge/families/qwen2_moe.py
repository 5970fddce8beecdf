"""Qwen 1.5 MoE and Qwen 2 MoE, with a gated shared expert (transformers/models/qwen2_moe)."""

from megatron_wrap.bridge.families.common_keys import decoder_config, decoder_values, need, refuse_unless
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.families.qwen2 import refuse_windows
from megatron_wrap.bridge.families.qwen3_moe import qwen_experts, qwen_experts_config
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig


def _arch_values(config: Config) -> Values:
    refuse_windows(config)
    refuse_unless(config, qkv_bias=True)
    values = decoder_values(config, tied=False)
    return {
        **values,
        **qwen_experts(config, values["num_layers"]),
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": need(config, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def _config_values(arch: ArchConfig) -> Values:
    shared = {"shared_expert_intermediate_size": arch.moe_shared_expert_intermediate_size}
    return {**decoder_config(arch), **qwen_experts_config(arch), **shared, "qkv_bias": True}


FAMILY = Family("qwen2_moe", "Qwen2MoeForCausalLM", _arch_values, _config_values, llama_table)
