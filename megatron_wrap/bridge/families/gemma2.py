"""Gemma 2: Gemma's layers with sliding windows in every other layer, and capped attention scores and logits
(transformers/models/gemma2)."""

from collections.abc import Mapping

from megatron_wrap.bridge.families.gemma import gemma_config, gemma_table, gemma_values
from megatron_wrap.bridge.families.mistral import layer_windows, layer_windows_config
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig

_DEFAULTS: Config = {"vocab_size": 256000, "max_position_embeddings": 8192}
_CAPS: Mapping[str, float] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Key, the same in `model.arch` and config.json -> transformers' default."""


def _arch_values(config: Config) -> Values:
    config = {"sliding_window": 4096, **config}
    values = gemma_values(config, _DEFAULTS)
    caps = {key: config.get(key, default) for key, default in _CAPS.items()}
    return {
        **values,
        **layer_windows(config, values["num_layers"], full_every=2),
        **{key: None if cap is None else float(cap) for key, cap in caps.items()},
    }


def _config_values(arch: ArchConfig) -> Values:
    return {**gemma_config(arch), **layer_windows_config(arch), **{key: getattr(arch, key) for key in _CAPS}}


FAMILY = Family("gemma2", "Gemma2ForCausalLM", _arch_values, _config_values, gemma_table)
