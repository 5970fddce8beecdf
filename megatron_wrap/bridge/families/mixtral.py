"""Mixtral: Mistral with MoE in every layer (transformers/models/mixtral)."""

from functools import partial

from megatron_wrap.bridge.families import common_keys, llama
from megatron_wrap.bridge.families.common_keys import Sizes, Table, refuse_unless
from megatron_wrap.bridge.families.mistral import window_config, window_values
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig


def _arch_values(config: Config) -> Values:
    refuse_unless(config, router_jitter_noise=0.0)
    values = common_keys.decoder_values({"rope_theta": 1000000.0, **config}, tied=False)  # transformers' default
    return {
        **values,
        **common_keys.experts_of_all_layers(config, values),
        **window_values(config.get("sliding_window")),
    }


def _config_values(arch: ArchConfig) -> Values:
    experts = {"num_local_experts": arch.num_experts, "num_experts_per_tok": arch.moe_router_topk}
    return {**common_keys.decoder_config(arch), **window_config(arch), **experts}


def block_sparse_moe(arch: ArchConfig, sizes: Sizes, prefix: str, hf_prefix: str) -> Table:
    """The table of a layer's experts."""
    return llama.experts_table(arch, sizes, prefix + "mlp.", hf_prefix + "block_sparse_moe.", names=("w1", "w3", "w2"))


_table = partial(llama.decoder_table, layer=partial(llama.decoder_layer, mlp=block_sparse_moe))
FAMILY = Family("mixtral", "MixtralForCausalLM", _arch_values, _config_values, _table)
