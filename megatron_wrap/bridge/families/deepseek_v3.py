"""DeepSeek V3: V2 with sigmoid scores and an expert bias for load balancing (transformers/models/deepseek_v3).

The layers for multi-token prediction are not loaded.
"""

from collections.abc import Mapping
from typing import Any

from megatron_wrap.bridge.families.decoder import need, refuse_unless
from megatron_wrap.bridge.families.deepseek_v2 import latent_config, latent_table, latent_values
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.config.schema.model import ArchConfig


def _arch_values(config: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unless(config, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, rope_interleave=True)
    groups: dict[str, Any] = {}
    if (config.get("n_group") or 1) > 1:
        groups = {
            "moe_router_num_groups": config["n_group"],
            "moe_router_group_topk": need(config, "topk_group"),
            "moe_router_group_score_experts": 2,
        }
    return {
        **latent_values(config),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        **groups,
    }


def _config_values(arch: ArchConfig) -> dict[str, Any]:
    groups = {"n_group": arch.moe_router_num_groups or 1, "topk_group": arch.moe_router_group_topk or 1}
    return {**latent_config(arch), **groups, "norm_topk_prob": True, "rope_interleave": True}


def _left_out(arch: ArchConfig) -> dict[str, str]:
    pattern = rf"model\.layers\.{arch.num_layers}\..*"
    return {pattern: "the layers for multi-token prediction are not loaded: not trained, and not exported"}


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=latent_table,
    left_out=_left_out,
    exported_values={"num_nextn_predict_layers": 0},
)
