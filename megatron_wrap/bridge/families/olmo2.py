"""OLMo 2: Llama with norms after attention and MLP, and of all queries and all keys of a token
(transformers/models/olmo2)."""

from functools import partial

from megatron_wrap.bridge.families import common_keys, llama
from megatron_wrap.bridge.families.common_keys import refuse_unless
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig

NORMS: Config = {"norm_placement": "after", "qk_layernorm": True, "qk_layernorm_type": "per_layer"}


def _arch_values(config: Config) -> Values:
    refuse_unless(config, attention_bias=False)
    # transformers' defaults
    values = common_keys.decoder_values({"num_key_value_heads": None, "rms_norm_eps": 1e-5, **config}, tied=False)
    return {**values, **NORMS}


def _config_values(arch: ArchConfig) -> Values:
    # transformers' default pad_token_id may be outside a small vocabulary
    return {**common_keys.decoder_config(arch), "attention_bias": False, "pad_token_id": None}


_layer = partial(llama.decoder_layer, norms=llama.norm_after_table)
olmo_table = partial(llama.decoder_table, layer=_layer)
FAMILY = Family("olmo2", "Olmo2ForCausalLM", _arch_values, _config_values, olmo_table)
