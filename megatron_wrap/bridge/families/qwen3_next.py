"""Qwen3-Next: gated delta networks in most layers, attention with output gates and partly rotated heads in the others,
zero-centered norms, experts with a gated shared one (transformers/models/qwen3_next). The layer for multi-token
prediction has attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from megatron_wrap.bridge.families import common_keys, llama
from megatron_wrap.bridge.families.common_keys import Sizes, Table, need, refuse_unless
from megatron_wrap.bridge.families.prediction_layers import prediction_layers_left_out, single_prediction_table
from megatron_wrap.bridge.families.qwen3_moe import qwen_experts, qwen_experts_config
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.bridge.mapping.tensors import Run
from megatron_wrap.config.schema.derived import linear_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig

LINEAR, FULL = "linear_attention", "full_attention"
_SIZES: Mapping[str, int] = {
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
"""Keys of the linear layers, which have the same names in config.json -> transformers' defaults."""


def hybrid_values(config: Config) -> Values:
    """Architecture keys of Qwen3-Next and Qwen3.5, without those of experts."""
    refuse_unless(config, attention_bias=False, attn_output_gate=True)
    values = common_keys.decoder_values({"partial_rotary_factor": 0.25, "head_dim": 256, **config}, tied=False)
    interval = config.get("full_attention_interval") or 4  # transformers' defaults
    default = [LINEAR if number % interval else FULL for number in range(1, values["num_layers"] + 1)]
    is_linear = common_keys.layers_of_kind(config, "layer_types", (LINEAR, FULL), default)
    linear: Values = {}
    if any(is_linear):
        linear = {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": is_linear,
            **{name: config.get(name, default) for name, default in _SIZES.items()},
        }
    return {
        **values,
        **linear,
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
    }


def hybrid_config(arch: ArchConfig) -> Values:
    """The inverse of `hybrid_values`."""
    return {
        **common_keys.decoder_config(arch),
        "partial_rotary_factor": arch.rotary_percent,
        "layer_types": [LINEAR if is_linear else FULL for is_linear in linear_layer_pattern(arch)],
        **{name: getattr(arch, name) for name in _SIZES},
        "attention_bias": False,
    }


Projection = Callable[[ArchConfig, str, int], WeightMapping]
"""(arch, prefix of the layer's tensors, hidden size) -> the mapping of `in_proj`."""


def hybrid_layer(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str, *, in_proj: Projection) -> Table:
    """The table of a layer of either kind."""
    is_linear = prefix.startswith("decoder.") and linear_layer_pattern(arch)[int(prefix.split(".")[2])]
    attention = partial(_linear_table, in_proj=in_proj) if is_linear else llama.attention_table
    return llama.decoder_layer(arch, sizes, prefix, hf_prefix, attention=attention)


def _linear_table(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str, in_proj: Projection) -> Table:
    prefix, hf_prefix = prefix + "self_attention.", hf_prefix + "linear_attn."
    heads, width = arch.linear_num_value_heads, arch.linear_value_head_dim
    convolved = weights.by_head(
        convolved_parts(arch, hf_prefix + "conv1d.weight"), arch.linear_num_key_heads, arch.linear_conv_kernel_dim
    )
    return {
        prefix + "in_proj.weight": in_proj(arch, hf_prefix, sizes.hidden),
        prefix + "conv_weight": weights.depthwise(convolved),
        prefix + "A_log": weights.column(hf_prefix + "A_log", heads),
        prefix + "dt_bias": weights.column(hf_prefix + "dt_bias", heads),
        prefix + "norm_weight": weights.replicated(hf_prefix + "norm.weight", width),
        prefix + "out_proj.weight": weights.row(hf_prefix + "out_proj.weight", sizes.hidden, heads * width),
    }


def convolved_parts(arch: ArchConfig, name: str) -> list[tuple[Run, int]]:
    """The parts of a tensor whose rows are the queries of all heads, then all keys, then all values; see `by_head`."""
    key, values = arch.linear_key_head_dim, values_per_key(arch) * arch.linear_value_head_dim
    keys = arch.linear_num_key_heads * key
    return [
        (Run(name, 0, key), key),
        (Run(name, keys, keys + key), key),
        (Run(name, 2 * keys, 2 * keys + values), values),
    ]


def values_per_key(arch: ArchConfig) -> int:
    """Number of value heads for each key head."""
    return arch.linear_num_value_heads // arch.linear_num_key_heads


def _in_proj(arch: ArchConfig, hf_prefix: str, hidden: int) -> WeightMapping:
    """The input projection as two tensors with rows ordered by key head: query, key, values, gates; betas, decays."""
    heads = values_per_key(arch)
    gates = heads * arch.linear_value_head_dim
    convolved = 2 * arch.linear_key_head_dim + gates
    qkvz, ba = hf_prefix + "in_proj_qkvz.weight", hf_prefix + "in_proj_ba.weight"
    parts = [
        (Run(qkvz, 0, convolved), convolved + gates),
        (Run(ba, 0, 2 * heads), 2 * heads),
        (Run(qkvz, convolved, convolved + gates), convolved + gates),
    ]
    return weights.by_head(parts, arch.linear_num_key_heads, hidden)


def hybrid_experts(config: Config, num_layers: int) -> Values:
    """Architecture keys of the experts of Qwen3-Next and Qwen3.5."""
    return {
        **qwen_experts({"norm_topk_prob": True, **config}, num_layers),  # transformers' default
        "moe_shared_expert_intermediate_size": need(config, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def hybrid_experts_config(arch: ArchConfig) -> Values:
    """The inverse of `hybrid_experts`."""
    values = qwen_experts_config(arch)
    del values["use_sliding_window"]
    return {**values, "shared_expert_intermediate_size": arch.moe_shared_expert_intermediate_size}


def hybrid_table(arch: ArchConfig, *, in_proj: Projection) -> Table:
    """The table of a model, with its layer for multi-token prediction."""
    layer = partial(hybrid_layer, in_proj=in_proj)
    return {**llama.decoder_table(arch, layer), **single_prediction_table(arch, layer)}


prediction_layer_left_out = partial(prediction_layers_left_out, named=r"mtp\..*")


def _arch_values(config: Config) -> Values:
    values = hybrid_values(config)
    return {**values, **hybrid_experts(config, values["num_layers"])}


def _config_values(arch: ArchConfig) -> Values:
    return {**hybrid_config(arch), **hybrid_experts_config(arch)}


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    parameters=partial(hybrid_table, in_proj=_in_proj),
    left_out=prediction_layer_left_out,
    max_prediction_layers=1,
)
