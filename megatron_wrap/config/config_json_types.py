"""Types and sizes of the values of config.json that the shipped families read. transformers reads the same types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_wrap.config.reading.yaml_nodes import describe
from megatron_wrap.errors import ConfigError

MAX_INTEGER = (1 << 31) - 1
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
    *("query_pre_attn_scalar", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions"),
    *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Keys of sizes, which are at least 1."""
_INTEGERS = (
    *(
        "original_max_position_embeddings",
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "n_inner",
        "n_shared_experts",
    ),
    *("shared_expert_intermediate_size", "q_lora_rank", "n_group", "topk_group", "rotary_dim"),
    *("sliding_window_pattern",),
)
_DEFAULTED_INTEGERS: Mapping[str, int] = {
    **{"decoder_sparse_step": 1, "first_k_dense_replace": 0, "no_rope_layer_interval": 1},
    "full_attention_interval": 1,
}
"""Key -> its smallest value. These keys have a default if they are missing, and may not be null."""
_NUMBERS = (
    *("rms_norm_eps", "rope_theta", "partial_rotary_factor", "attention_dropout", "rope_local_base_freq"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
_DEFAULTED_NUMBERS = (
    *("initializer_range", "layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop", "routed_scaling_factor"),
    *("residual_dropout", "swiglu_alpha", "swiglu_limit"),
)
_FLAGS = (
    *("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "use_sliding_window", "norm_topk_prob"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_decoder"),
    *("attention_out_bias", "use_qk_norm", "attn_output_gate"),
)
_ROPE_NUMBERS = (
    *("factor", "rope_theta", "partial_rotary_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor"),
    "llama_4_scaling_beta",
)
_LAYER_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers, the keys of their rotary parameters (OLMo 3, Gemma 3)."""
_LOOPS: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 100_000),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 100_000),
}
"""Key -> largest number of parts that a model is built of."""


def check_types(values: Mapping[str, Any]) -> None:
    """Refuse values of a wrong type.

    Raises:
        ConfigError: with the key and the value.
    """
    for names, least in ((_SIZES, 1), (_INTEGERS, 0)):
        for name in names:
            if values.get(name) is not None:
                _check_integer(name, values[name], least, _LOOPS.get(name, MAX_INTEGER))
    for name, least in _DEFAULTED_INTEGERS.items():
        if name in values:
            _check_integer(name, values[name], least, MAX_INTEGER)
    for name in _NUMBERS:
        _check_number(name, values.get(name))
    for name in _DEFAULTED_NUMBERS:
        if name in values and values[name] is None:
            raise ConfigError(f"{name} must be a number, not null")
        _check_number(name, values.get(name))
    for name in _FLAGS:
        if not isinstance(values.get(name), bool | None):
            raise ConfigError(f"{name} must be true or false, not {describe(values[name])}")
    for name in ("layer_types", "mlp_layer_types", "mlp_only_layers", "no_rope_layers"):
        items = values.get(name)
        if items is not None and not (isinstance(items, list) and all(isinstance(item, str | int) for item in items)):
            raise ConfigError(f"{name} must be a list of names or numbers, not {describe(items)}")
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(name, values.get(name))
        for kind in _LAYER_KINDS:
            _check_rope(f"{name}.{kind}", (values.get(name) or {}).get(kind))


def _check_rope(name: str, rope: Any) -> None:
    if not isinstance(rope, dict | None):
        raise ConfigError(f"{name} must be a mapping, not {describe(rope)}")
    for key in _ROPE_NUMBERS:
        _check_number(f"{name}.{key}", (rope or {}).get(key))
    for key in ("short_factor", "long_factor"):
        factors = (rope or {}).get(key)
        if not isinstance(factors, list | None):
            raise ConfigError(f"{name}.{key} must be a list of numbers, not {describe(factors)}")
        for factor in factors or ():
            if factor is None:
                raise ConfigError(f"{name}.{key} must be a list of numbers, not {describe(factors)}")
            _check_number(f"{name}.{key}", factor)
    for key in ("rope_type", "type"):
        if not isinstance((rope or {}).get(key), str | None):
            raise ConfigError(f"{name}.{key} must be a name, not {describe((rope or {})[key])}")


def _check_integer(name: str, value: Any, at_least: int, at_most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, not {describe(value)}")
    if not at_least <= value <= at_most:
        raise ConfigError(f"{name} must be at least {at_least} and at most {at_most:,}, not {describe(value)}")


def _check_number(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, not {describe(value)}")
    if abs(value) > 1e30 or math.isnan(value):
        raise ConfigError(f"{name} must be a finite number, not {describe(value)}")
