"""SmolLM 3: Llama with layers without rotary positions (transformers/models/smollm3)."""

from megatron_wrap.bridge.families import llama
from megatron_wrap.bridge.families.common_keys import every_nth
from megatron_wrap.bridge.families.llama import llama_table
from megatron_wrap.bridge.families.qwen2 import refuse_windows
from megatron_wrap.bridge.mapping.family import Config, Family, Values
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel

_DEFAULTS: Config = {"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True}
"""Defaults of transformers (configuration_smollm3.py)."""


def _arch_values(config: Config) -> Values:
    refuse_windows(config)
    values = llama.FAMILY.arch_values({**_DEFAULTS, **config})
    layers, interval = values["num_layers"], config.get("no_rope_layer_interval", 4)
    rotary = config.get("no_rope_layers")  # 1: the layer has rotary positions
    if rotary is None:
        rotary = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(rotary) < layers or any(each not in (0, 1) for each in rotary):
        raise UnsupportedModel(f"no_rope_layers must contain 0 or 1 for each of the {layers} layers, not {rotary}")
    return {**values, "no_rope_freq": _no_rope_freq([1 - each for each in rotary[:layers]])}


def _no_rope_freq(without: list[int]) -> int | list[int] | None:
    """The layers without rotary positions in Megatron-Core's form: N if it is every N-th layer, else a list with 1 for
    each such layer; None if there are none."""
    if not any(without):
        return None
    interval = every_nth(without)
    return interval if interval is not None and len(without) % interval == 0 else without


def _config_values(arch: ArchConfig) -> Values:
    without = arch.upstream.get("no_rope_freq") or [0] * arch.num_layers
    if isinstance(without, int):  # Megatron-Core's: every N-th layer
        without = [int((layer + 1) % without == 0) for layer in range(arch.num_layers)]
    values = {**llama.FAMILY.config_values(arch), "use_sliding_window": False}
    width = values.pop("head_dim")
    if width * arch.num_attention_heads != arch.hidden_size:
        values["head_dim"] = width
    # transformers' default pad_token_id may be outside a small vocabulary
    return {**values, "no_rope_layers": [1 - each for each in without], "pad_token_id": None}


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", _arch_values, _config_values, llama_table)
