"""GLM-4.7-Flash: DeepSeek V3 with a list of the dense layers (transformers/models/glm4_moe_lite)."""

from dataclasses import replace

from megatron_wrap.bridge.families import deepseek_v3
from megatron_wrap.bridge.families.common_keys import layers_of_kind
from megatron_wrap.bridge.mapping.family import Config, Values
from megatron_wrap.config.schema.model import ArchConfig

_DEFAULTS: Config = {"routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1}
"""Defaults of transformers (configuration_glm4_moe_lite.py)."""


def _arch_values(config: Config) -> Values:
    # without mlp_layer_types the first layer is dense in transformers, which does not read first_k_dense_replace
    values = deepseek_v3.FAMILY.arch_values({**_DEFAULTS, **config, "first_k_dense_replace": 1})
    if not config.get("mlp_layer_types"):
        return values
    kinds = layers_of_kind(config, "mlp_layer_types", ("sparse", "dense"), ["sparse"] * values["num_layers"])
    return {**values, "moe_layer_freq": kinds}


def _config_values(arch: ArchConfig) -> Values:
    values = deepseek_v3.FAMILY.config_values(arch)
    first_dense = values.pop("first_k_dense_replace")
    kinds = ["dense"] * first_dense + ["sparse"] * (arch.num_layers - first_dense)
    return {**values, "mlp_layer_types": kinds}


FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
)
