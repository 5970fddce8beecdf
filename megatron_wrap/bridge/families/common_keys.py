"""Shared parts of the families: keys of config.json that most of them have, rotary embeddings among them, and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wrap.bridge.mapping.family import Config, Values
from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.config.schema.derived import ffn_hidden_size, kv_channels, num_query_groups
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel

Table = dict[str, WeightMapping]
"""Global name of a parameter -> its Hugging Face tensors."""

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3.1's RoPE scaling in Megatron-Core (embeddings/rotary_pos_embedding.py, _apply_scaling)."""

PLAIN: Values = {
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_type": "rope",
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "norm_placement": "before",
    "qk_layernorm": False,
    "qk_layernorm_type": "per_head",
    "swiglu": True,
    "geglu": False,
    "quick_geglu": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "squared_relu": False,
    "openai_gelu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "softmax_type": "vanilla",
    "embedding_multiplier": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_scaling_beta": None,
    "longrope_short_factor": None,
    "longrope_long_factor": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "window_rotary_base": None,
    "multi_latent_attention": False,
    "latent_norm_epsilon": None,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "num_experts": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Values of a Llama-like decoder; a family overrides the values that differ. Every key that affects the model's
function is here or in `decoder_values`, so no default of the configuration tree is used."""

YARN: Mapping[str, tuple[str, float | None]] = {
    "rotary_scaling_factor": ("factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""Key of `model.arch` -> (key in config.json, transformers' default; None: required)."""

ROUTER: Values = {
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_score_experts": None,
    "moe_router_enable_expert_bias": False,
}
"""Values of a router with a softmax over the chosen experts; a family overrides the values that differ."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the shapes of weights."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    width: int
    vocab: int

    @classmethod
    def of(cls, arch: ArchConfig) -> Sizes:
        """The sizes of an architecture; its vocab_size must be set."""
        assert arch.vocab_size is not None
        return cls(
            arch.hidden_size,
            ffn_hidden_size(arch),
            arch.num_attention_heads,
            num_query_groups(arch),
            kv_channels(arch),
            arch.vocab_size,
        )


def every_nth(layers: Sequence[int]) -> int | None:
    """N if exactly the layers N, 2 N, ... (from 1) are marked with 1; None otherwise."""
    interval = list(layers).index(1) + 1 if 1 in layers else None
    if interval is None or any(bool(mark) != ((number + 1) % interval == 0) for number, mark in enumerate(layers)):
        return None
    return interval


def need(config: Config, *names: str) -> Any:
    """A required value of config.json, under the first of these names that it has.

    Raises:
        UnsupportedModel: it is missing.
    """
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise UnsupportedModel(f"{' or '.join(names)} is missing")


def need_or_null(config: Config, key: str) -> Any:
    """A value of config.json that may be null. transformers' classes have other defaults where it is missing.

    Raises:
        UnsupportedModel: it is missing.
    """
    if key not in config:
        raise UnsupportedModel(f"{key} is missing")
    return config[key]


def layers_of_kind(config: Config, key: str, kinds: tuple[str, str], default: Sequence[str]) -> list[int]:
    """1 for each layer that is of the first kind in a list of config.json, 0 for each of the second.

    Args:
        default: kind of each layer where the list is missing.

    Raises:
        UnsupportedModel: another kind, or not one for each layer.
    """
    layers = config.get(key) or default
    if len(layers) != len(default) or set(layers) - set(kinds):
        raise UnsupportedModel(f"{key} must be {kinds[0]} or {kinds[1]} for each of num_hidden_layers {len(default)}")
    return [int(kind == kinds[0]) for kind in layers]


def refuse_unless(config: Config, **expected: Any) -> None:
    """Compare values of config.json with the only ones that are supported; a missing value is accepted.

    Raises:
        UnsupportedModel: a value is not supported; the message has both values of the first one.
    """
    for key, value in expected.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if key in config and config[key] not in allowed:
            raise UnsupportedModel(f"{key} is {config[key]!r}, and only {' or '.join(map(repr, allowed))} can be built")


def decoder_values(config: Config, *, tied: bool, act: Iterable[str] = ("silu",)) -> Values:
    """Architecture keys from the config.json keys that all Llama-like families share.

    A key that changes the model's function and that config.json omits has the default of most of transformers' classes;
    a family whose class has another one adds it to `config` (tests/unit/bridge/families/test_missing_keys.py).

    Args:
        tied: the family's default of tie_word_embeddings.
        act: supported values of hidden_act.
    """
    refuse_unless(config, hidden_act=tuple(act), is_decoder=False, add_cross_attention=False)
    heads = need(config, "num_attention_heads")
    hidden = need(config, "hidden_size")
    return {
        **PLAIN,
        "num_layers": need(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": need(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": need_or_null(config, "num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or hidden // heads,
        "vocab_size": need(config, "vocab_size"),
        "max_position_embeddings": need(config, "max_position_embeddings"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", tied),
        "norm_epsilon": float(need(config, "rms_norm_eps")),
        "init_method_std": float(config.get("initializer_range", 0.02)),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        **rope_values(config),
    }


def hidden_dropout(config: Config, default: float) -> float:
    """The dropout of residuals and embeddings, for which Megatron-Core has a single value."""
    dropouts = {float(config.get(key, default) or 0.0) for key in ("resid_pdrop", "embd_pdrop")}
    if len(dropouts) > 1:
        raise UnsupportedModel("resid_pdrop and embd_pdrop differ, but Megatron-Core has one hidden_dropout")
    return dropouts.pop()


def experts_of_all_layers(config: Config, values: Config) -> Values:
    """Architecture keys of experts in every layer, with the width of a dense MLP.

    Args:
        values: the keys of `decoder_values`.
    """
    return {
        **ROUTER,
        "num_experts": need(config, "num_local_experts"),
        "moe_layer_freq": [1] * values["num_layers"],
        "moe_ffn_hidden_size": values["ffn_hidden_size"],
        "moe_router_topk": need(config, "num_experts_per_tok"),
    }


def rope_parameters(config: Config) -> tuple[str, Values]:
    """Kind and parameters of the rotary embedding, from `rope_scaling` or `rope_parameters`; transformers 5 reads
    `rope_scaling` if a file has both."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope.get("rope_type", rope.get("type", "default")), rope


def rope_values(config: Config) -> Values:
    """Rotary embedding keys from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier)."""
    kind, rope = rope_parameters(config)
    either = {"rope_theta": 10000.0, **config, **rope}
    share = either.get("partial_rotary_factor")
    values: Values = {
        "rotary_base": float(need(either, "rope_theta")),
        "rotary_percent": 1.0 if share is None else float(share),
    }
    if kind == "llama3":
        rope = {"original_max_position_embeddings": config.get("max_position_embeddings"), **rope}
        for key, fixed in LLAMA3_SCALING.items():
            if float(need(rope, key)) != float(fixed):
                raise UnsupportedModel(f"rope {key} is {rope[key]}, and Megatron-Core fixes it at {fixed}")
        return {**values, "use_rope_scaling": True, "rope_scaling_factor": float(need(rope, "factor"))}
    if kind == "linear":
        return {**values, "rotary_seq_len_interpolation_factor": float(need(rope, "factor"))}
    if kind == "yarn":
        return {**values, **yarn_values(rope)}
    if kind != "default":
        raise UnsupportedModel(
            f"rope_type is {kind!r}, but Megatron-Core's GPT supports default, linear, llama3 and yarn"
        )
    return values


def yarn_values(rope: Config) -> Values:
    """Rotary embedding keys of YaRN. transformers reads mscale and mscale_all_dim only if both are set and not 0
    (modeling_rope_utils.py, _compute_yarn_parameters)."""
    if (factor := rope.get("attention_factor")) is not None and not math.isclose(factor, _yarn_factor(rope)):
        raise UnsupportedModel(f"attention_factor of YaRN is {factor}, and only {_yarn_factor(rope)} can be built")
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        rope = {**rope, "mscale": 1.0, "mscale_all_dim": 0.0}
    values = {
        key: float(rope.get(hf_key) or (need(rope, hf_key) if default is None else default))
        for key, (hf_key, default) in YARN.items()
    }
    return {
        "rope_type": "yarn",
        **values,
        "original_max_position_embeddings": int(values["original_max_position_embeddings"]),
        "correction_range_round_to_int": bool(rope.get("truncate", True)),
    }


def _yarn_factor(rope: Config) -> float:
    """The attention factor that transformers computes where config.json has none."""
    scale = 0.1 * math.log(max(float(need(rope, "factor")), 1.0))
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return scale + 1.0
    return float((rope["mscale"] * scale + 1.0) / (rope["mscale_all_dim"] * scale + 1.0))


def yarn_config(arch: ArchConfig) -> Values:
    """The inverse of `yarn_values`."""
    scaling = {hf_key: getattr(arch, key) for key, (hf_key, _) in YARN.items()}
    if not arch.mscale_all_dim:
        del scaling["mscale"], scaling["mscale_all_dim"]
    return {"rope_type": "yarn", **scaling, "truncate": arch.correction_range_round_to_int}


def decoder_config(arch: ArchConfig) -> Values:
    """The inverse of `decoder_values`, with the keys that both transformers 4.57 and 5 read."""
    sizes = Sizes.of(arch)
    scaling: Values | None = None
    if arch.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": arch.rope_scaling_factor, **LLAMA3_SCALING}
    elif arch.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": arch.rotary_seq_len_interpolation_factor}
    elif arch.rope_type == "yarn":
        scaling = yarn_config(arch)
    values: Values = {
        "num_hidden_layers": arch.num_layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.width,
        "hidden_act": "silu",
        "vocab_size": sizes.vocab,
        "max_position_embeddings": arch.max_position_embeddings,
        "tie_word_embeddings": not arch.untie_embeddings_and_output_weights,
        "rms_norm_eps": arch.norm_epsilon,
        "initializer_range": arch.init_method_std,
        "attention_dropout": arch.attention_dropout,
        "rope_theta": arch.rotary_base,
        "rope_scaling": scaling,
    }
    if arch.rotary_percent != 1.0:
        values["partial_rotary_factor"] = arch.rotary_percent
    return values
