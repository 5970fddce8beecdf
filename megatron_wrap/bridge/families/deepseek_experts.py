"""The mixture of experts that DeepSeek, GLM-4.5 and Kimi share: dense first layers, shared experts, and from DeepSeek
V3 on sigmoid scores with a bias that affects only the choice of experts."""

from __future__ import annotations

from megatron_wrap.bridge.families.common_keys import ROUTER, need, need_or_null, refuse_unless
from megatron_wrap.bridge.mapping.family import Config, Values
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
