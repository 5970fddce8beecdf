"""Qwen3.5, dense: the layers of Qwen3-Next with other projections, and dense MLPs (transformers/models/qwen3_5)."""

from __future__ import annotations

from functools import partial

from megatron_wrap.bridge.families import qwen3_next
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Family, Values
from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.bridge.mapping.tensors import Run
from megatron_wrap.config.schema.model import ArchConfig


def in_proj(arch: ArchConfig, hf_prefix: str, hidden: int) -> WeightMapping:
    """The input projection as one tensor for queries, keys and values, and one each for betas, decays and gates, with
    rows ordered by head."""
    heads = qwen3_next.values_per_key(arch)
    gates = heads * arch.linear_value_head_dim
    parts = [
        *qwen3_next.convolved_parts(arch, hf_prefix + "in_proj_qkv.weight"),
        (Run(hf_prefix + "in_proj_b.weight", 0, heads), heads),
        (Run(hf_prefix + "in_proj_a.weight", 0, heads), heads),
        (Run(hf_prefix + "in_proj_z.weight", 0, gates), gates),
    ]
    return weights.by_head(parts, arch.linear_num_key_heads, hidden)


parameters = partial(qwen3_next.hybrid_table, in_proj=in_proj)


def prediction_config(arch: ArchConfig) -> Values:
    """Values of an exported config.json about the layer for multi-token prediction."""
    return {"mtp_num_hidden_layers": arch.mtp_num_layers or 0}


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    arch_values=qwen3_next.hybrid_values,
    config_values=qwen3_next.hybrid_config,
    parameters=parameters,
    left_out=qwen3_next.prediction_layer_left_out,
    exported_values=prediction_config,
    max_prediction_layers=1,
)
