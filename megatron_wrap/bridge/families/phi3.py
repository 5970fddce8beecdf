"""Phi 3 and Phi-4-mini (dense models): Llama with fused projections, long contexts by LongRoPE
(transformers/models/phi3)."""

import math
from functools import partial

from megatron_wrap.bridge.families import common_keys, llama
from megatron_wrap.bridge.families.common_keys import Sizes, Table, need
from megatron_wrap.bridge.families.mistral import window_config, window_values
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel

LONG = ("longrope", "su", "yarn")
"""Names of LongRoPE in config.json; earlier releases use the last two (Phi3Config)."""
_DEFAULTS: Config = {"num_key_value_heads": None, "original_max_position_embeddings": 4096}
"""Defaults of transformers (configuration_phi3.py)."""


def _arch_values(config: Config) -> Values:
    config = {**_DEFAULTS, **config}
    kind, rope = common_keys.rope_parameters(config)
    plain = config
    if kind in LONG:
        theta = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        plain = {**config, "rope_scaling": None, "rope_parameters": theta}
    values = common_keys.decoder_values(plain, tied=False) | (_longrope(config, rope) if kind in LONG else {})
    dropout = common_keys.hidden_dropout(config, 0.0)
    return {**values, "hidden_dropout": dropout, **window_values(config.get("sliding_window"))}


def _longrope(config: Config, rope: Config) -> Values:
    """Architecture keys of LongRoPE (modeling_rope_utils.py, _compute_longrope_parameters; standardize_rope_params
    replaces the rotary parameters' own original_max_position_embeddings)."""
    original = need(config, "original_max_position_embeddings")
    factor = rope.get("factor") or need(config, "max_position_embeddings") / original
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": int(original),
        "longrope_short_factor": [float(each) for each in need(rope, "short_factor")],
        "longrope_long_factor": [float(each) for each in need(rope, "long_factor")],
        "longrope_attention_factor": float(attention),
    }


def _config_values(arch: ArchConfig) -> Values:
    values = common_keys.decoder_config(arch)
    if values.pop("head_dim") * arch.num_attention_heads != arch.hidden_size:
        raise UnsupportedModel("kv_channels is not hidden_size / num_attention_heads")
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop"), arch.hidden_dropout)
    limits = {"original_max_position_embeddings": arch.max_position_embeddings}
    if arch.rope_type == "longrope":
        limits["original_max_position_embeddings"] = arch.original_max_position_embeddings
        values["rope_scaling"] = {
            "type": "longrope",
            "short_factor": list(arch.longrope_short_factor or ()),
            "long_factor": list(arch.longrope_long_factor or ()),
            "attention_factor": arch.longrope_attention_factor,
        }
    # transformers' default pad_token_id may be outside a small vocabulary
    return {**values, **dropouts, **limits, **window_config(arch), "pad_token_id": None}


def _layer(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    attention, mlp = hf_prefix + "self_attn.", hf_prefix + "mlp."
    qkv, gate_up = attention + "qkv_proj.weight", mlp + "gate_up_proj.weight"
    inner = sizes.heads * sizes.width
    return {
        **llama.norm_table(sizes, prefix, hf_prefix),
        prefix + "self_attention.linear_qkv.weight": weights.query_key_value(
            qkv, qkv, qkv, sizes.heads, sizes.groups, sizes.width, sizes.hidden
        ),
        prefix + "self_attention.linear_proj.weight": weights.row(attention + "o_proj.weight", sizes.hidden, inner),
        prefix + "mlp.linear_fc1.weight": weights.gated(gate_up, gate_up, sizes.ffn, sizes.hidden),
        prefix + "mlp.linear_fc2.weight": weights.row(mlp + "down_proj.weight", sizes.hidden, sizes.ffn),
    }


_table = partial(llama.decoder_table, layer=_layer)
FAMILY = Family("phi3", "Phi3ForCausalLM", _arch_values, _config_values, _table)
