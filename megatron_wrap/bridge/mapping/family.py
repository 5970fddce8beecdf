"""Definition of a Hugging Face family: translation of its config.json to `megatron_lm.model.arch` and back, and the
mapping of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_wrap.bridge.mapping.tensors import Mapping as WeightMapping
from megatron_wrap.config.schema.model import ArchConfig

Config = Mapping[str, Any]
"""Keys of a config.json, or of a part of it, and their values."""
Values = dict[str, Any]
"""Keys of `megatron_lm.model.arch`, or of a config.json that is written, and their values."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers. Both directions of the translation are pure functions of the values, so the
    family can express an architecture if and only if `arch_values(config_values(arch))` returns it unchanged."""

    model_type: str
    architecture: str
    """transformers' class of the causal language model, written into `architectures`."""
    arch_values: Callable[[Config], Values]
    """config.json -> keys of `megatron_lm.model.arch`, including further fields of Megatron-Core's TransformerConfig.
    Raises `UnsupportedModel` for values that Megatron-Core cannot express."""
    config_values: Callable[[ArchConfig], Values]
    """Keys of `megatron_lm.model.arch` -> config.json, without the keys that every family has (`architectures`,
    `model_type`, `dtype`)."""
    parameters: Callable[[ArchConfig], dict[str, WeightMapping]]
    """Global name of each parameter of the model -> its Hugging Face tensors, in model order."""
    base_prefix: str = "model."
    """Prefix that is missing in files saved from transformers' base model (without the output layer)."""
    ignored: tuple[str, ...] = ()
    """Patterns (full match) of buffers that older files contain; they are not read."""
    left_out: Callable[[ArchConfig], dict[str, str]] = lambda arch: {}
    """Patterns (full match) of tensors of parts that the model is built without -> a warning for the user."""
    new_if_missing: tuple[str, ...] = ()
    """Tensors that a folder may lack; the model then keeps its initial weights of them."""
    exported_values: Callable[[ArchConfig], Config] = lambda arch: {}
    """Values of an exported config.json that replace those of the original."""
    copies: Callable[[ArchConfig], Mapping[str, str]] = lambda arch: {}
    """Name of a further tensor -> the tensor that it copies: written beside it, and not read."""
    max_prediction_layers: int = 0
    """Largest number of layers for multi-token prediction (`mtp_num_layers`) in the table."""

    splits_stacks: bool = False
    """Whether a folder may have the experts of a layer in one tensor; `parameters` names the tensors of each expert."""

    is_adapter: bool = False
    """Whether the files contain an adapter, so that they lack the parameters of the base."""

    def shapes(self, arch: ArchConfig) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every Hugging Face tensor of the architecture, in model order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for mapping in self.parameters(arch).values():
            for name, shape in mapping.shapes().items():
                shapes[name] = tuple(map(max, shapes.get(name, shape), shape))
        return shapes
