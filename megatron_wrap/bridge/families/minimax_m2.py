"""MiniMax-M2: partly rotated heads, norms of all queries and all keys of a token, and experts chosen by sigmoid scores
with a bias (transformers/models/minimax_m2).

The modules for multi-token prediction are not loaded.
"""

from __future__ import annotations

from functools import partial

from megatron_wrap.bridge.families import common_keys, llama
from megatron_wrap.bridge.families.common_keys import Sizes, Table, refuse_unless
from megatron_wrap.bridge.families.mixtral import block_sparse_moe
from megatron_wrap.bridge.families.prediction_layers import prediction_layers_left_out
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import kv_channels
from megatron_wrap.config.schema.model import ArchConfig

_PUBLISHED: Config = {
    **{"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"},
    "shared_intermediate_size": 0,
}
"""Values of the published config.json that transformers does not read, because it supports no others."""


def _arch_values(config: Config) -> Values:
    refuse_unless(config, router_jitter_noise=0.0, **_PUBLISHED)
    width = config.get("head_dim") or 128  # transformers' default
    if config.get("rotary_dim") is not None:
        config = {"partial_rotary_factor": config["rotary_dim"] / width, **config}
    values = common_keys.decoder_values({"rope_theta": 5000000.0, **config, "head_dim": width}, tied=False)
    return {
        **values,
        **common_keys.experts_of_all_layers(config, values),
        "qk_layernorm": True,
        "qk_layernorm_type": "per_layer",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }


def _config_values(arch: ArchConfig) -> Values:
    return {
        **common_keys.decoder_config(arch),
        **_PUBLISHED,
        "rotary_dim": int(kv_channels(arch) * arch.rotary_percent),
        "num_local_experts": arch.num_experts,
        "num_experts_per_tok": arch.moe_router_topk,
    }


def _layer(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    assert arch.num_experts is not None
    bias = weights.replicated(hf_prefix + "block_sparse_moe.e_score_correction_bias", arch.num_experts)
    table = llama.decoder_layer(arch, sizes, prefix, hf_prefix, mlp=block_sparse_moe)
    return {**table, prefix + "mlp.router.expert_bias": weights.in_fp32(bias)}


FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=partial(llama.decoder_table, layer=_layer),
    left_out=partial(prediction_layers_left_out, advice=""),
    exported_values=lambda arch: {"use_mtp": False, "num_mtp_modules": 0},
)
