"""GLM-4.5, 4.6 and 4.7: attention with partly rotated heads, biases and optional norms of queries and keys, and
DeepSeek V3's experts (transformers/models/glm4_moe).
"""

from dataclasses import replace
from functools import partial

from megatron_wrap.bridge.families import common_keys, deepseek_v2, deepseek_v3, llama
from megatron_wrap.bridge.families.common_keys import Table
from megatron_wrap.bridge.families.prediction_layers import prediction_table
from megatron_wrap.bridge.mapping.family import Config, Values
from megatron_wrap.config.schema.model import ArchConfig

_DEFAULTS: Config = {
    **{"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    **{"n_group": 1, "topk_group": 1},
}
"""Defaults of transformers (configuration_glm4_moe.py)."""


def _arch_values(config: Config) -> Values:
    config = {**_DEFAULTS, **config}
    values = common_keys.decoder_values(config, tied=False)
    return {
        **values,
        **deepseek_v2.expert_values(config, values["num_layers"]),
        **deepseek_v2.sigmoid_router_values(config),
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
    }


def _config_values(arch: ArchConfig) -> Values:
    attention = {"attention_bias": arch.add_qkv_bias, "use_qk_norm": arch.qk_layernorm}
    experts = {**deepseek_v2.expert_config(arch), **deepseek_v2.sigmoid_router_config(arch)}
    return {
        **common_keys.decoder_config(arch),
        **experts,
        **attention,
        "partial_rotary_factor": arch.rotary_percent,
    }


_layer = partial(llama.decoder_layer, mlp=partial(llama.mlp_of_layer, shared="shared_experts"))


def _parameters(arch: ArchConfig) -> Table:
    return {**llama.decoder_table(arch, _layer), **prediction_table(arch, _layer)}


FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=_parameters,
)
