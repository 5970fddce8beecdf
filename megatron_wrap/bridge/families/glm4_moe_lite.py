"""GLM-4.7-Flash: DeepSeek V3 with a list of the dense layers (transformers/models/glm4_moe_lite)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_wrap.bridge.families import deepseek_v3
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel


def _arch_values(config: Mapping[str, Any]) -> dict[str, Any]:
    values = deepseek_v3.FAMILY.arch_values({"first_k_dense_replace": 1, **config})  # transformers' default
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return values
    layers = values["num_layers"]
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise UnsupportedModel(f"mlp_layer_types must contain dense or sparse for each of the {layers} layers")
    return {**values, "moe_layer_freq": [int(kind == "sparse") for kind in kinds]}


def _config_values(arch: ArchConfig) -> dict[str, Any]:
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
