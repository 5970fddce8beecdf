"""DeepSeek V3: V2 with sigmoid scores and an expert bias for load balancing (transformers/models/deepseek_v3)."""

from megatron_wrap.bridge.families import prediction_layers
from megatron_wrap.bridge.families.common_keys import Table, refuse_unless
from megatron_wrap.bridge.families.deepseek_v2 import (
    latent_config,
    latent_layer,
    latent_table,
    latent_values,
    sigmoid_router_config,
    sigmoid_router_values,
)
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig

_DEFAULTS: Config = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
"""Defaults of transformers (configuration_deepseek_v3.py)."""


def _arch_values(config: Config) -> Values:
    config = {**_DEFAULTS, **config}
    refuse_unless(config, rope_interleave=True)
    return {**latent_values(config), **sigmoid_router_values(config)}


def _config_values(arch: ArchConfig) -> Values:
    return {**latent_config(arch), **sigmoid_router_config(arch), "rope_interleave": True}


def _parameters(arch: ArchConfig) -> Table:
    return {**latent_table(arch), **prediction_layers.prediction_table(arch, latent_layer)}


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=_parameters,
    left_out=prediction_layers.prediction_layers_left_out,
    exported_values=prediction_layers.prediction_config,
    copies=prediction_layers.prediction_copies,
    max_prediction_layers=prediction_layers.ANY_NUMBER,
)
