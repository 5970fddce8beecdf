"""Ministral 3: Mistral with YaRN and queries that grow with their position (transformers/models/ministral3)."""

from megatron_wrap.bridge.families.common_keys import decoder_config, decoder_values, need, rope_parameters
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.families.mistral import window_config, window_values
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel

DEFAULT_ROPE: Config = {
    **{"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
"""Defaults of transformers for rotary parameters (configuration_ministral3.py)."""


def query_scaling_values(config: Config) -> Values:
    """Architecture keys of the scaling of queries by their position, which uses YaRN's original context."""
    kind, rope = rope_parameters(config)
    if kind != "yarn":
        raise UnsupportedModel(f"rope_type is {kind!r}, but queries are scaled by YaRN's original context")
    return {"query_scaling_beta": float(need(rope, "llama_4_scaling_beta"))}


def query_scaling_config(arch: ArchConfig, values: Config) -> Values:
    """The inverse of `query_scaling_values`, for the other `values` of config.json."""
    if arch.query_scaling_beta is None or values["rope_scaling"] is None:
        raise UnsupportedModel("query_scaling_beta and rope_type yarn are needed")
    return {"rope_scaling": {**values["rope_scaling"], "llama_4_scaling_beta": arch.query_scaling_beta}}


def _arch_values(config: Config) -> Values:
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {**config, "rope_scaling": DEFAULT_ROPE}
    values = decoder_values({"head_dim": 128, **config}, tied=False)  # transformers' default
    return {**values, **query_scaling_values(config), **window_values(config.get("sliding_window"))}


def _config_values(arch: ArchConfig) -> Values:
    values = decoder_config(arch)
    return {**values, **query_scaling_config(arch, values), **window_config(arch), "pad_token_id": None}


FAMILY = Family("ministral3", "Ministral3ForCausalLM", _arch_values, _config_values, llama_table)
