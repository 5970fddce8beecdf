"""gpt-oss: learned attention sinks, sliding windows in every other layer, YaRN, biases, and experts with a clamped
gated activation (transformers/models/gpt_oss).

The experts of a layer are stacked in one tensor, transposed, in which the rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_wrap.bridge.families import decoder
from megatron_wrap.bridge.families.decoder import ROUTER, Sizes, Table, need, refuse_unless
from megatron_wrap.bridge.families.mistral import FULL, SLIDING, layer_windows, layer_windows_config
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.config.schema.derived import moe_ffn_hidden_size
from megatron_wrap.config.schema.model import ArchConfig

_ALPHA = 1.702
"""Of Megatron-Core's quick_gelu (megatron/core/activations.py)."""
_DEFAULTS: Mapping[str, Any] = {
    **{"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_dropout": 0.0, "sliding_window": 128},
    **{"max_position_embeddings": 131072, "head_dim": 64},
}
_DEFAULT_ROPE: Mapping[str, Any] = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
"""transformers' (configuration_gpt_oss.py)."""


def _arch_values(config: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unless(config, attention_bias=True, swiglu_alpha=_ALPHA)
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {**config, "rope_scaling": _DEFAULT_ROPE}
    config = {**_DEFAULTS, **config}
    values = decoder.decoder_values(config, tied=False)
    return {
        **values,
        **ROUTER,
        **layer_windows(config.get("layer_types") or _alternating(values["num_layers"]), config, values["num_layers"]),
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "swiglu": False,
        "quick_geglu": True,
        "activation_func_clamp_value": float(config.get("swiglu_limit", 7.0)),
        "glu_linear_offset": 1.0,
        # transformers 5 also reads num_experts
        "num_experts": config.get("num_experts") or need(config, "num_local_experts"),
        "moe_layer_freq": [1] * values["num_layers"],
        "moe_ffn_hidden_size": values["ffn_hidden_size"],
        "moe_router_topk": need(config, "num_experts_per_tok"),
    }


def _alternating(layers: int) -> list[str]:
    return [(SLIDING, FULL)[layer % 2] for layer in range(layers)]


def _config_values(arch: ArchConfig) -> dict[str, Any]:
    return {
        **decoder.decoder_config(arch),
        **layer_windows_config(arch),
        "attention_bias": True,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": arch.activation_func_clamp_value or 7.0,
        "num_local_experts": arch.num_experts,
        "num_experts_per_tok": arch.moe_router_topk,
        "pad_token_id": None,
    }


def _layer(arch: ArchConfig, sizes: Sizes, ours: str, theirs: str) -> Table:
    sinks = ours + "self_attention.core_attention.softmax_offset"
    return {
        **decoder.norm_table(sizes, ours, theirs),
        **decoder.attention_table(arch, sizes, ours, theirs),
        sinks: weights.column(theirs + "self_attn.sinks", sizes.heads),
        **_experts_table(arch, sizes.hidden, ours + "mlp.", theirs + "mlp."),
    }


def _experts_table(arch: ArchConfig, hidden: int, ours: str, theirs: str) -> Table:
    assert arch.num_experts is not None
    table = {
        ours + "router.weight": weights.replicated(theirs + "router.weight", arch.num_experts, hidden),
        ours + "router.bias": weights.replicated(theirs + "router.bias", arch.num_experts),
    }
    ffn = moe_ffn_hidden_size(arch)
    gate_up, down = theirs + "experts.gate_up_proj", theirs + "experts.down_proj"
    parts = {
        "linear_fc1.weight": weights.interleaved(weights.transposed(weights.column(gate_up, 2 * ffn, hidden))),
        "linear_fc1.bias": weights.interleaved(weights.column(gate_up + "_bias", 2 * ffn)),
        "linear_fc2.weight": weights.transposed(weights.row(down, hidden, ffn)),
        "linear_fc2.bias": weights.replicated(down + "_bias", hidden),
    }
    for number in range(arch.num_experts):
        table |= {f"{ours}experts.{number}.{name}": weights.stacked(part, number) for name, part in parts.items()}
    return table


_table = partial(decoder.decoder_table, layer=_layer)
FAMILY = Family("gpt_oss", "GptOssForCausalLM", _arch_values, _config_values, _table)
