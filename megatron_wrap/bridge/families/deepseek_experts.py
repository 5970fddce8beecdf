"""The mixture of experts that DeepSeek, GLM-4.5 and Kimi share: dense first layers, shared experts, and from DeepSeek
V3 on sigmoid scores with a bias that only chooses experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_wrap.bridge.families.decoder import ROUTER, LayerTable, Sizes, Table, need, refuse_unless
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.config.schema.derived import moe_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel


def expert_values(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Architecture keys of the experts, with the router of `ROUTER` except for its number of choices."""
    first_dense = config.get("first_k_dense_replace", 0)
    width, shared = need(config, "moe_intermediate_size"), config.get("n_shared_experts") or 0
    scaling = float(config.get("routed_scaling_factor", 1.0))
    return {
        **ROUTER,
        "num_experts": need(config, "n_routed_experts"),
        "moe_layer_freq": [int(layer >= first_dense) for layer in range(num_layers)],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width or None,
        "moe_router_topk": need(config, "num_experts_per_tok"),
        "moe_router_topk_scaling_factor": None if scaling == 1.0 else scaling,
    }


def expert_config(arch: ArchConfig) -> dict[str, Any]:
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


def sigmoid_router_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of DeepSeek V3's router that differ from `expert_values`."""
    refuse_unless(config, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)
    values: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }
    if (config.get("n_group") or 1) > 1:
        values |= {
            "moe_router_num_groups": config["n_group"],
            "moe_router_group_topk": need(config, "topk_group"),
            "moe_router_group_score_experts": 2,
        }
    return values


def sigmoid_router_config(arch: ArchConfig) -> dict[str, Any]:
    """The inverse of `sigmoid_router_values`."""
    groups = {"n_group": arch.moe_router_num_groups or 1, "topk_group": arch.moe_router_group_topk or 1}
    return {**groups, "norm_topk_prob": True}


def prediction_table(arch: ArchConfig, layer: LayerTable) -> Table:
    """The table of the layers for multi-token prediction, which follow the decoder's (`model.layers.61.` in DeepSeek
    V3). The norm after each is `shared_head.norm`.

    Args:
        layer: as for `decoder_table`.
    """
    sizes, table = Sizes.of(arch), {}
    for number in range(arch.mtp_num_layers or 0):
        ours, theirs = f"mtp_block.layers.{number}.", f"model.layers.{arch.num_layers + number}."
        for norm in ("enorm", "hnorm"):
            table[f"{ours}{norm}.weight"] = weights.replicated(f"{theirs}{norm}.weight", sizes.hidden)
        table[f"{ours}eh_proj.weight"] = weights.column(f"{theirs}eh_proj.weight", sizes.hidden, 2 * sizes.hidden)
        table |= layer(arch, sizes, f"{ours}transformer_layer.", theirs)
        table[f"{ours}final_layernorm.weight"] = weights.replicated(f"{theirs}shared_head.norm.weight", sizes.hidden)
    return table


def prediction_copies(arch: ArchConfig) -> dict[str, str]:
    """The copies of embedding and output layer in each layer for multi-token prediction -> the originals."""
    prefixes = [f"model.layers.{arch.num_layers + number}." for number in range(arch.mtp_num_layers or 0)]
    return {
        prefix + copy: original
        for prefix in prefixes
        for copy, original in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        )
    }


def prediction_config(arch: ArchConfig) -> dict[str, Any]:
    """Values of an exported config.json about the layers for multi-token prediction."""
    return {"num_nextn_predict_layers": arch.mtp_num_layers or 0}


def prediction_layers_left_out(
    arch: ArchConfig, advice: str = "; megatron_lm.model.arch.mtp_num_layers: 1 loads them"
) -> dict[str, str]:
    """Patterns of the layers for multi-token prediction that a run does not build -> the warning that they are left
    out, which ends with the advice; empty: for a family that cannot have them."""
    if arch.mtp_num_layers is not None:
        return {}
    return {
        rf"model\.layers\.{arch.num_layers}\..*": "the layers for multi-token prediction are not loaded: not trained, "
        f"and not exported{advice}"
    }
