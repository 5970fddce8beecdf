"""Qwen 3 MoE (transformers/models/qwen3_moe)."""

from megatron_wrap.bridge.families.common_keys import ROUTER, decoder_config, decoder_values, need, refuse_unless
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.families.qwen2 import refuse_windows
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import moe_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig


def qwen_experts(config: Config, num_layers: int) -> Values:
    """Architecture keys from the config.json keys that Qwen's MoE families share."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return {
        **ROUTER,
        # transformers 5 writes num_local_experts
        "num_experts": need(config, "num_local_experts", "num_experts"),
        "moe_layer_freq": [int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers)],
        "moe_ffn_hidden_size": need(config, "moe_intermediate_size"),
        "moe_router_topk": need(config, "num_experts_per_tok"),
        # transformers divides the softmax over all experts by the sum of the chosen: a softmax over the chosen ones
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


def qwen_experts_config(arch: ArchConfig) -> Values:
    """The inverse of `qwen_experts`."""
    return {
        "num_experts": arch.num_experts,
        "num_experts_per_tok": arch.moe_router_topk,
        "moe_intermediate_size": arch.moe_ffn_hidden_size,
        "norm_topk_prob": not arch.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number, experts in enumerate(moe_layer_pattern(arch)) if not experts],
        "use_sliding_window": False,
    }


def _arch_values(config: Config) -> Values:
    refuse_windows(config)
    refuse_unless(config, attention_bias=False)
    values = decoder_values(config, tied=False)
    return {**values, **qwen_experts(config, values["num_layers"]), "qk_layernorm": True}


def _config_values(arch: ArchConfig) -> Values:
    return {**decoder_config(arch), **qwen_experts_config(arch), "attention_bias": False}


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", _arch_values, _config_values, llama_table)
