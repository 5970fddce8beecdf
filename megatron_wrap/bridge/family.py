"""What a family is: its names and shapes, and its config.json in the terms of `megatron_lm.model.arch` and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_wrap.bridge.mapping import Mapping as WeightMapping
from megatron_wrap.config.schema import ArchConfig


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers. Both directions of the configuration are functions of values alone, so the
    family can express an architecture exactly where `arch_values(config_values(arch))` gives it back."""

    model_type: str
    architecture: str
    """transformers' class of the causal language model, written into `architectures`."""
    arch_values: Callable[[Mapping[str, Any]], dict[str, Any]]
    """config.json -> keys of `megatron_lm.model.arch`, further fields of Megatron-Core's TransformerConfig among them.
    Raises `UnsupportedModel` for what cannot be expressed."""
    config_values: Callable[[ArchConfig], dict[str, Any]]
    """The other way, without what is the same in each (`architectures`, `model_type`, `dtype`)."""
    parameters: Callable[[ArchConfig], dict[str, WeightMapping]]
    """Global name of each parameter of the whole model -> where it comes from, in the order of the model."""
    base_prefix: str = "model."
    """Prefix that files written by transformers' bare model (without its head) leave out."""
    ignored: tuple[str, ...] = ()
    """Patterns (full match) of tensors that older files hold and no model has: buffers."""
    left_out: Callable[[ArchConfig], dict[str, str]] = lambda arch: {}
    """Patterns of tensors that belong to a part which is not built -> what a user is told of it."""
    exported_values: Mapping[str, Any] = field(default_factory=dict)
    """What config.json of an export says whatever that of the beginning said."""
