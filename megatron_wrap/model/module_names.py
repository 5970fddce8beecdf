"""Names of modules in the whole model, whichever process holds them."""

from __future__ import annotations

import re

from torch import nn

from megatron_wrap.model.initial_weights import named_layers

_LAYER = re.compile(r"(decoder\.layers\.\d+|mtp_block\.layers\.\d+\.transformer_layer)(\..*)?")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)(.*)")


def global_module_names(chunk: nn.Module) -> dict[nn.Module, str]:
    """Module -> name in the whole model, for the chunk and all modules in it: global numbers of layers and of experts
    (`decoder.layers.7.mlp.experts.5.linear_fc1`), as in `global_names`. The chunk itself is `the model`."""
    layers = named_layers(chunk) if hasattr(chunk, "decoder") else {}
    names: dict[nn.Module, str] = {}
    for name, module in chunk.named_modules():
        match = _LAYER.fullmatch(name)
        if match:
            prefix, layer = layers[match[1]]
            name = prefix + _with_global_expert(match[2] or "", layer)
        names[module] = name or "the model"
    return names


def _with_global_expert(name: str, layer: nn.Module) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    numbers: list[int] = getattr(layer.mlp, "local_expert_indices", [])
    return f".mlp.experts.{numbers[int(match[1])]}{match[2]}"
