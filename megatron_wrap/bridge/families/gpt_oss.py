"""gpt-oss: learned attention sinks, sliding windows in every other layer, YaRN, biases, and experts with a clamped
gated activation (transformers/models/gpt_oss).

The experts of a layer are stacked in one tensor, transposed, in which the rows of gate and up alternate.
"""

from __future__ import annotations

from functools import partial

from megatron_wrap.bridge.families import common_keys, llama
from megatron_wrap.bridge.families.common_keys import Sizes, Table, refuse_unless
from megatron_wrap.bridge.families.mistral import layer_windows, layer_windows_config
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import moe_ffn_hidden_size
from megatron_wrap.config.schema.model import ArchConfig

_ALPHA = 1.702
"""Factor in Megatron-Core's quick_gelu (megatron/core/activations.py)."""
_DEFAULTS: Config = {
    **{"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_dropout": 0.0, "sliding_window": 128},
    **{"max_position_embeddings": 131072, "head_dim": 64},
}
_DEFAULT_ROPE: Config = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
"""Defaults of transformers for rotary parameters (configuration_gpt_oss.py)."""


def _arch_values(config: Config) -> Values:
    refuse_unless(config, attention_bias=True, swiglu_alpha=_ALPHA)
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {**config, "rope_scaling": _DEFAULT_ROPE}
    experts = common_keys.need(config, "num_experts", "num_local_experts")  # transformers 5 also reads num_experts
    config = {**_DEFAULTS, **config, "num_local_experts": experts}
    values = common_keys.decoder_values(config, tied=False)
    return {
        **values,
        **common_keys.experts_of_all_layers(config, values),
        **layer_windows(config, values["num_layers"], full_every=2),
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "swiglu": False,
        "quick_geglu": True,
        "activation_func_clamp_value": float(config.get("swiglu_limit", 7.0)),
        "glu_linear_offset": 1.0,
    }


def _config_values(arch: ArchConfig) -> Values:
    return {
        **common_keys.decoder_config(arch),
        **layer_windows_config(arch),
        "attention_bias": True,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": arch.activation_func_clamp_value or 7.0,
        "num_local_experts": arch.num_experts,
        "num_experts_per_tok": arch.moe_router_topk,
        "pad_token_id": None,
    }


def _layer(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    sinks = prefix + "self_attention.core_attention.softmax_offset"
    table = llama.decoder_layer(arch, sizes, prefix, hf_prefix, mlp=_experts_table)
    return {**table, sinks: weights.column(hf_prefix + "self_attn.sinks", sizes.heads)}


def _experts_table(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    assert arch.num_experts is not None
    hidden, prefix, hf_prefix = sizes.hidden, prefix + "mlp.", hf_prefix + "mlp."
    table = {
        prefix + "router.weight": weights.replicated(hf_prefix + "router.weight", arch.num_experts, hidden),
        prefix + "router.bias": weights.replicated(hf_prefix + "router.bias", arch.num_experts),
    }
    ffn = moe_ffn_hidden_size(arch)
    gate_up, down = hf_prefix + "experts.gate_up_proj", hf_prefix + "experts.down_proj"
    parts = {
        "linear_fc1.weight": weights.interleaved(weights.transposed(weights.column(gate_up, 2 * ffn, hidden))),
        "linear_fc1.bias": weights.interleaved(weights.column(gate_up + "_bias", 2 * ffn)),
        "linear_fc2.weight": weights.transposed(weights.row(down, hidden, ffn)),
        "linear_fc2.bias": weights.replicated(down + "_bias", hidden),
    }
    for number in range(arch.num_experts):
        table |= {f"{prefix}experts.{number}.{name}": weights.stacked(part, number) for name, part in parts.items()}
    return table


_table = partial(llama.decoder_table, layer=_layer)
FAMILY = Family("gpt_oss", "GptOssForCausalLM", _arch_values, _config_values, _table)
