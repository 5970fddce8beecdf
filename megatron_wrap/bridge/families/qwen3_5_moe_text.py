"""Qwen3.5 with experts: its layers with the experts of Qwen3-Next in all of them (transformers/models/qwen3_5_moe)."""

from __future__ import annotations

from dataclasses import replace

from megatron_wrap.bridge.families import qwen3_5_text
from megatron_wrap.bridge.families.common_keys import need
from megatron_wrap.bridge.families.qwen3_next import hybrid_config, hybrid_experts, hybrid_experts_config, hybrid_values
from megatron_wrap.bridge.mapping.family import Config, Values
from megatron_wrap.config.schema.derived import moe_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel

_DENSE = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
"""Keys of Qwen3-Next that the family does not have; transformers ignores them."""


def _arch_values(config: Config) -> Values:
    config = {key: value for key, value in config.items() if key not in _DENSE}
    values = hybrid_values({**config, "intermediate_size": need(config, "moe_intermediate_size")})
    return {**values, **hybrid_experts(config, values["num_layers"])}


def _config_values(arch: ArchConfig) -> Values:
    if 0 in moe_layer_pattern(arch):
        raise UnsupportedModel("some layers are dense, and all of this family have experts")
    values = {**hybrid_config(arch), **hybrid_experts_config(arch)}
    return {key: value for key, value in values.items() if key not in (*_DENSE, "intermediate_size")}


FAMILY = replace(
    qwen3_5_text.FAMILY,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    arch_values=_arch_values,
    config_values=_config_values,
    splits_stacks=True,  # the published folders stack them, transformers 5 does not
)
