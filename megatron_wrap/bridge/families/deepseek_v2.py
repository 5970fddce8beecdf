"""DeepSeek V2: multi-latent attention, shared experts, and group-limited routing (transformers/models/deepseek_v2). Its
mixture of experts is that of GLM-4.5, Kimi and Mistral 4.

The router of DeepSeek V3 has sigmoid scores with a bias that affects only the choice of experts.
"""

from __future__ import annotations

from megatron_wrap.bridge.families import common_keys, llama
from megatron_wrap.bridge.families.common_keys import ROUTER, Sizes, Table, need, need_or_null, refuse_unless
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import moe_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel


def expert_values(config: Config, num_layers: int) -> Values:
    """Architecture keys of the experts, with the router of `ROUTER` except for its number of choices."""
    first_dense = need(config, "first_k_dense_replace")
    width, shared = need(config, "moe_intermediate_size"), need_or_null(config, "n_shared_experts") or 0
    scaling = float(need(config, "routed_scaling_factor"))
    return {
        **ROUTER,
        "num_experts": need(config, "n_routed_experts"),
        "moe_layer_freq": [int(layer >= first_dense) for layer in range(num_layers)],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width or None,
        "moe_router_topk": need(config, "num_experts_per_tok"),
        "moe_router_topk_scaling_factor": None if scaling == 1.0 else scaling,
    }


def expert_config(arch: ArchConfig) -> Values:
    """The inverse of `expert_values`."""
    layers = moe_layer_pattern(arch)
    first_dense = sum(not experts for experts in layers)
    if list(layers) != [0] * first_dense + [1] * (len(layers) - first_dense):
        raise UnsupportedModel(f"moe_layer_freq is {list(layers)}, but only the first layers may be dense")
    shared = (arch.moe_shared_expert_intermediate_size or 0) / (arch.moe_ffn_hidden_size or 1)
    if shared != int(shared):
        raise UnsupportedModel("moe_shared_expert_intermediate_size is not a multiple of moe_ffn_hidden_size")
    return {
        "n_routed_experts": arch.num_experts,
        "n_shared_experts": int(shared),
        "moe_intermediate_size": arch.moe_ffn_hidden_size,
        "first_k_dense_replace": first_dense,
        "num_experts_per_tok": arch.moe_router_topk,
        "routed_scaling_factor": arch.moe_router_topk_scaling_factor or 1.0,
    }


def sigmoid_router_values(config: Config) -> Values:
    """Keys of DeepSeek V3's router that differ from `expert_values`."""
    refuse_unless(config, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)
    values: Values = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }
    if (need_or_null(config, "n_group") or 1) > 1:
        values |= {
            "moe_router_num_groups": config["n_group"],
            "moe_router_group_topk": need(config, "topk_group"),
            "moe_router_group_score_experts": 2,
        }
    return values


def sigmoid_router_config(arch: ArchConfig) -> Values:
    """The inverse of `sigmoid_router_values`."""
    groups = {"n_group": arch.moe_router_num_groups or 1, "topk_group": arch.moe_router_group_topk or 1}
    return {**groups, "norm_topk_prob": True}


LATENT_NORM_EPSILON = 1e-6
"""Epsilon of the latent vectors' norms, a constant in transformers (modeling_deepseek_v2.py, kv_a_layernorm)."""
_DEFAULTS: Config = {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0}
"""Defaults of transformers (configuration_deepseek_v2.py)."""
_REPLACED = ("rope_scaling", "partial_rotary_factor", "head_dim", "num_key_value_heads")
"""Keys of `decoder_values` that have no effect: the head sizes are those of latent attention, whose `qk_rope_head_dim`
is rotated as a whole."""


def latent_values(config: Config) -> Values:
    """All architecture keys except the router's."""
    refuse_unless(config, attention_bias=False, mlp_bias=False, moe_layer_freq=1)
    kind, rope = common_keys.rope_parameters(config)
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    plain = {**config, **dict.fromkeys(_REPLACED), "rope_parameters": theta}
    values = common_keys.decoder_values(plain, tied=False)
    del values["kv_channels"]  # replaced by the head sizes below
    return {
        **values,
        **_rope(kind, rope),
        **expert_values(config, values["num_layers"]),
        "num_query_groups": values["num_attention_heads"],
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": need_or_null(config, "q_lora_rank"),
        "kv_lora_rank": need(config, "kv_lora_rank"),
        "qk_head_dim": need(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": need(config, "qk_rope_head_dim"),
        "v_head_dim": need(config, "v_head_dim"),
        "latent_norm_epsilon": None if values["norm_epsilon"] == LATENT_NORM_EPSILON else LATENT_NORM_EPSILON,
    }


def _rope(kind: str, rope: Config) -> Values:
    if kind == "default":
        return {"rope_type": "rope"}
    if kind != "yarn" or rope.get("attention_factor") is not None:
        raise UnsupportedModel(
            f"rope_type is {kind!r}, but multi-latent attention supports default, and yarn without attention_factor"
        )
    for name in ("mscale", "mscale_all_dim"):
        if not rope.get(name):
            raise UnsupportedModel(f"{name} of yarn is missing")
    refuse_unless(rope, truncate=True)
    return common_keys.yarn_values(rope)


def latent_config(arch: ArchConfig) -> Values:
    """The inverse of `latent_values`."""
    values = common_keys.decoder_config(arch)
    del values["head_dim"]
    return {
        **values,
        **expert_config(arch),
        "attention_bias": False,
        "q_lora_rank": arch.q_lora_rank,
        "kv_lora_rank": arch.kv_lora_rank,
        "qk_nope_head_dim": arch.qk_head_dim,
        "qk_rope_head_dim": arch.qk_pos_emb_head_dim,
        "v_head_dim": arch.v_head_dim,
    }


def latent_layer(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    """One layer, dense or MoE."""
    mcore_attention, hf_attention = prefix + "self_attention.", hf_prefix + "self_attn."
    query = sizes.heads * (arch.qk_head_dim + arch.qk_pos_emb_head_dim)
    latent = arch.kv_lora_rank
    table = llama.norm_table(sizes, prefix, hf_prefix)
    if arch.q_lora_rank is None:
        table[mcore_attention + "linear_q_proj.weight"] = weights.column(
            hf_attention + "q_proj.weight", query, sizes.hidden
        )
    else:
        rank = arch.q_lora_rank
        table[mcore_attention + "linear_q_down_proj.weight"] = weights.column(
            hf_attention + "q_a_proj.weight", rank, sizes.hidden
        )
        table[mcore_attention + "q_layernorm.weight"] = weights.replicated(hf_attention + "q_a_layernorm.weight", rank)
        table[mcore_attention + "linear_q_up_proj.weight"] = weights.column(
            hf_attention + "q_b_proj.weight", query, rank
        )
    down = latent + arch.qk_pos_emb_head_dim
    up = sizes.heads * (arch.qk_head_dim + arch.v_head_dim)
    table |= {
        mcore_attention + "linear_kv_down_proj.weight": weights.column(
            hf_attention + "kv_a_proj_with_mqa.weight", down, sizes.hidden
        ),
        mcore_attention + "kv_layernorm.weight": weights.replicated(hf_attention + "kv_a_layernorm.weight", latent),
        mcore_attention + "linear_kv_up_proj.weight": weights.column(hf_attention + "kv_b_proj.weight", up, latent),
        mcore_attention + "linear_proj.weight": weights.row(
            hf_attention + "o_proj.weight", sizes.hidden, sizes.heads * arch.v_head_dim
        ),
    }
    return {**table, **llama.mlp_of_layer(arch, sizes, prefix, hf_prefix, shared="shared_experts")}


def latent_table(arch: ArchConfig) -> Table:
    """The weight table of DeepSeek V2 and V3."""
    return llama.decoder_table(arch, latent_layer)


def _arch_values(config: Config) -> Values:
    method = config.get("topk_method", "greedy")
    refuse_unless(config, topk_method=("greedy", "group_limited_greedy"), scoring_func="softmax", norm_topk_prob=False)
    groups: Values = {}
    if method == "group_limited_greedy":
        groups = {
            "moe_router_num_groups": need(config, "n_group"),
            "moe_router_group_topk": need(config, "topk_group"),
            "moe_router_group_score_experts": 1,
        }
    return {**latent_values({**_DEFAULTS, **config}), "moe_router_pre_softmax": True, **groups}


def _config_values(arch: ArchConfig) -> Values:
    grouped = arch.moe_router_num_groups is not None
    return {
        **latent_config(arch),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": arch.moe_router_num_groups,
        "topk_group": arch.moe_router_group_topk,
        "norm_topk_prob": False,
    }


FAMILY = Family("deepseek_v2", "DeepseekV2ForCausalLM", _arch_values, _config_values, latent_table)
