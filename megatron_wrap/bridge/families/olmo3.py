"""OLMo 3: OLMo 2 with sliding windows in some layers, whose rotary frequencies are not scaled
(transformers/models/olmo3)."""

from megatron_wrap.bridge.families.mistral import (
    layer_windows,
    layer_windows_config,
    rope_of_kinds,
    rope_of_kinds_config,
    window_rope_values,
)
from megatron_wrap.bridge.families.olmo2 import FAMILY as OLMO2
from megatron_wrap.bridge.families.olmo2 import olmo_table
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig

_BASE = 500000.0
"""transformers' default_theta (configuration_olmo3.py), which layers with a window have even if the earlier
`rope_theta` differs."""


def _arch_values(config: Config) -> Values:
    config = {"sliding_window": 4096, **config}  # transformers' default
    whole, window = rope_of_kinds(config, base=_BASE, window_base=_BASE)
    values = OLMO2.arch_values({**config, "rope_scaling": None, "rope_parameters": whole})
    values |= layer_windows(config, values["num_layers"], full_every=4)
    return {**values, **window_rope_values(values, window)}


def _config_values(arch: ArchConfig) -> Values:
    values = OLMO2.config_values(arch)
    return {**values, **layer_windows_config(arch), **rope_of_kinds_config(arch, values)}


FAMILY = Family("olmo3", "Olmo3ForCausalLM", _arch_values, _config_values, olmo_table)
