"""Seed-OSS: Llama with biases in the query, key and value projections and an explicit head size
(transformers/models/seed_oss).

`residual_dropout` is Megatron-Core's hidden_dropout, which in training also drops the embedding's output.
"""

from megatron_wrap.bridge.families.common_keys import decoder_config, decoder_values, refuse_unless
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig


def _arch_values(config: Config) -> Values:
    refuse_unless(config, attention_out_bias=False, mlp_bias=False)
    # transformers' defaults
    values = decoder_values({"head_dim": 128, "attention_dropout": 0.1, **config}, tied=False)
    dropout = float(config.get("residual_dropout", 0.1))
    return {**values, "add_qkv_bias": bool(config.get("attention_bias", True)), "hidden_dropout": dropout}


def _config_values(arch: ArchConfig) -> Values:
    biases = {"attention_bias": arch.add_qkv_bias, "attention_out_bias": False, "mlp_bias": False}
    return {**decoder_config(arch), **biases, "residual_dropout": arch.hidden_dropout, "pad_token_id": None}


FAMILY = Family("seed_oss", "SeedOssForCausalLM", _arch_values, _config_values, llama_table)
