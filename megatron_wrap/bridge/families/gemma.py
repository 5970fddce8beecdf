"""Gemma 1 (transformers/models/gemma), and the layers that all Gemma families share: norms stored zero-centered, before
attention and MLP and, except in Gemma 1, after them; a scaled embedding that is tied to the output layer; a gated MLP
with GELU; and an explicit scale of attention scores."""

from __future__ import annotations

import math
from functools import partial

from megatron_wrap.bridge.families import common_keys, llama
from megatron_wrap.bridge.families.common_keys import Sizes, Table, need, refuse_unless
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import kv_channels
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel

ACTIVATION = "gelu_pytorch_tanh"
_DEFAULTS: Config = {
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256},
}
"""Defaults of transformers (configuration_gemma2.py, configuration_gemma3.py), which published files omit."""


def gemma_values(config: Config, defaults: Config) -> Values:
    """Architecture keys from config.json.

    Args:
        defaults: transformers' defaults of the family, in addition to the shared ones.
    """
    config = {**_DEFAULTS, **defaults, **config}
    refuse_unless(config, attention_bias=False, use_bidirectional_attention=(False, None))
    # transformers reads hidden_activation; files of the first release also have hidden_act, which it ignores
    config["hidden_act"] = config.get("hidden_activation") or ACTIVATION
    values = common_keys.decoder_values(config, tied=True, act=(ACTIVATION,))
    scalar = need(config, "query_pre_attn_scalar")
    return {
        **values,
        "swiglu": False,
        "geglu": True,
        "apply_layernorm_1p": True,
        "norm_placement": "both",
        "embedding_multiplier": math.sqrt(values["hidden_size"]),
        "softmax_scale": None if scalar == values["kv_channels"] else scalar**-0.5,
    }


def gemma_config(arch: ArchConfig) -> Values:
    """The inverse of `gemma_values`."""
    scale = arch.upstream.get("softmax_scale")
    scalar = kv_channels(arch) if scale is None else round(scale**-2)
    if scale is not None and not math.isclose(scalar**-0.5, scale):
        raise UnsupportedModel(f"softmax_scale is {scale}, and only 1 / sqrt of an integer can be written")
    values = {**common_keys.decoder_config(arch), "attention_bias": False, "query_pre_attn_scalar": scalar}
    del values["hidden_act"]
    # transformers' default pad_token_id may be outside a small vocabulary
    return {**values, "hidden_activation": ACTIVATION, "pad_token_id": None}


def _norms(sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    names = {"input_layernorm.weight": "input_layernorm", "pre_mlp_layernorm.weight": "pre_feedforward_layernorm"}
    before = {
        prefix + name: weights.replicated(f"{hf_prefix}{norm}.weight", sizes.hidden) for name, norm in names.items()
    }
    return {**before, **llama.norm_after_table(sizes, prefix, hf_prefix)}


gemma_table = partial(llama.decoder_table, layer=partial(llama.decoder_layer, norms=_norms))


_GEMMA1_DEFAULTS: Config = {
    **{"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192},
}
"""Further defaults of transformers for Gemma 1 (configuration_gemma.py)."""


def _arch_values(config: Config) -> Values:
    # files of the first release contain gelu, and transformers also computes the tanh form for them
    refuse_unless(config, hidden_act=("gelu", ACTIVATION), hidden_activation=(None, ACTIVATION))
    width = config.get("head_dim") or 256  # transformers' default
    fixed = {"head_dim": width, "query_pre_attn_scalar": width, "hidden_activation": ACTIVATION}
    values = gemma_values({**config, **fixed}, _GEMMA1_DEFAULTS)
    return {**values, "norm_placement": "before"}


def _config_values(arch: ArchConfig) -> Values:
    values = gemma_config(arch)
    return {key: value for key, value in values.items() if key != "query_pre_attn_scalar"} | {"hidden_act": ACTIVATION}


FAMILY = Family("gemma", "GemmaForCausalLM", _arch_values, _config_values, llama_table)
