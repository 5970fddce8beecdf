"""Mistral Small 4: DeepSeek V3's attention with queries that grow with their position, and experts chosen by a softmax
(transformers/models/mistral4)."""

from functools import partial

from megatron_wrap.bridge.families.common_keys import Sizes, Table, refuse_unless
from megatron_wrap.bridge.families.deepseek_v2 import latent_config, latent_layer, latent_values
from megatron_wrap.bridge.families.llama import decoder_table
from megatron_wrap.bridge.families.ministral3 import DEFAULT_ROPE, query_scaling_config, query_scaling_values
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.derived import moe_ffn_hidden_size, moe_layer_pattern
from megatron_wrap.config.schema.model import ArchConfig

_DEFAULT_ROPE: Config = {
    **DEFAULT_ROPE,
    **{"rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
}
"""Defaults of transformers for rotary parameters (configuration_mistral4.py)."""
_DEFAULTS: Config = {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0}
"""Defaults of transformers for other keys (configuration_mistral4.py)."""


def _arch_values(config: Config) -> Values:
    # Megatron-Core ranks groups by logits where the softmax is over the chosen experts
    refuse_unless(config, rope_interleave=True, n_group=(1, None))
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {**config, "rope_scaling": _DEFAULT_ROPE}
    return {
        **latent_values({**_DEFAULTS, **config}),
        **query_scaling_values(config),
        # the softmax over all experts, divided by the sum of the chosen, is a softmax over the chosen ones
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
    }


def _config_values(arch: ArchConfig) -> Values:
    values = latent_config(arch)
    return {
        **values,
        **query_scaling_config(arch, values),
        **{"n_group": 1, "topk_group": 1},
        "norm_topk_prob": not arch.moe_router_pre_softmax,
        "rope_interleave": True,
        # transformers has the sum of both as head_dim, and adds this share to its own form of rope_parameters alone
        "partial_rotary_factor": arch.qk_pos_emb_head_dim / (arch.qk_head_dim + arch.qk_pos_emb_head_dim),
        "pad_token_id": None,
    }


def _layer(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    table = latent_layer(arch, sizes, prefix, hf_prefix)
    if not moe_layer_pattern(arch)[int(prefix.split(".")[2])]:
        return table
    ffn, experts = moe_ffn_hidden_size(arch), hf_prefix + "mlp.experts."
    gate_up = weights.gated(experts + "gate_up_proj", experts + "gate_up_proj", ffn, sizes.hidden)
    down = weights.row(experts + "down_proj", sizes.hidden, ffn)
    for number in range(arch.num_experts or 0):  # all experts of a layer are in one tensor
        expert = f"{prefix}mlp.experts.{number}."
        table[expert + "linear_fc1.weight"] = weights.stacked(gate_up, number)
        table[expert + "linear_fc2.weight"] = weights.stacked(down, number)
    return table


_table = partial(decoder_table, layer=_layer)
FAMILY = Family("mistral4", "Mistral4ForCausalLM", _arch_values, _config_values, _table)
