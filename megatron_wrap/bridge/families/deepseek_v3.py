"""DeepSeek V3: V2 with sigmoid scores and an expert bias for load balancing (transformers/models/deepseek_v3)."""

from collections.abc import Mapping
from typing import Any

from megatron_wrap.bridge.families.common_keys import Table, refuse_unless
from megatron_wrap.bridge.families.deepseek_experts import sigmoid_router_config, sigmoid_router_values
from megatron_wrap.bridge.families.deepseek_v2 import latent_config, latent_layer, latent_table, latent_values
from megatron_wrap.bridge.families.prediction_layers import (
    ANY_NUMBER,
    prediction_config,
    prediction_copies,
    prediction_layers_left_out,
    prediction_table,
)
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.config.schema.model import ArchConfig

_DEFAULTS: Mapping[str, Any] = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
"""transformers' (configuration_deepseek_v3.py)."""


def _arch_values(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**_DEFAULTS, **config}
    refuse_unless(config, rope_interleave=True)
    return {**latent_values(config), **sigmoid_router_values(config)}


def _config_values(arch: ArchConfig) -> dict[str, Any]:
    return {**latent_config(arch), **sigmoid_router_config(arch), "rope_interleave": True}


def _parameters(arch: ArchConfig) -> Table:
    return {**latent_table(arch), **prediction_table(arch, latent_layer)}


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=_parameters,
    left_out=prediction_layers_left_out,
    exported_values=prediction_config,
    copies=prediction_copies,
    max_prediction_layers=ANY_NUMBER,
)
