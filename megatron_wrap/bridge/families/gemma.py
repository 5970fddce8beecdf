"""Gemma 1: Gemma's layers with norms before attention and MLP alone (transformers/models/gemma)."""

from megatron_wrap.bridge.families.common_keys import refuse_unless
from megatron_wrap.bridge.families.gemma_layers import ACTIVATION, gemma_config, gemma_values
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig

_DEFAULTS: Config = {
    **{"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192},
}


def _arch_values(config: Config) -> Values:
    # files of the first release contain gelu, and transformers also computes the tanh form for them
    refuse_unless(config, hidden_act=("gelu", ACTIVATION), hidden_activation=(None, ACTIVATION))
    width = config.get("head_dim") or 256  # transformers' default
    fixed = {"head_dim": width, "query_pre_attn_scalar": width, "hidden_activation": ACTIVATION}
    values = gemma_values({**config, **fixed}, _DEFAULTS)
    return {**values, "norm_placement": "before"}


def _config_values(arch: ArchConfig) -> Values:
    values = gemma_config(arch)
    return {key: value for key, value in values.items() if key != "query_pre_attn_scalar"} | {"hidden_act": ACTIVATION}


FAMILY = Family("gemma", "GemmaForCausalLM", _arch_values, _config_values, llama_table)
