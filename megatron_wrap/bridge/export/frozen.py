"""The parameters that `train.freeze` names, and those that a run trains. Needs neither torch nor Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from megatron_wrap.bridge.export.adapted import layers_with_adapters
from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.bridge.mapping.adapter_targets import ADAPTER, adapter_family
from megatron_wrap.config.checks.contradictions import refuse
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import UnsupportedModel, did_you_mean
from megatron_wrap.plan.model_parts import ModelShape, model_shape, parameter_names

_KEY = ["train.freeze"]


def check_frozen(config: RunConfig) -> None:
    """Validate `train.freeze` against the architecture, before any process starts; a model of no family's architecture
    is validated when it is built.

    Raises:
        ConfigError: as `frozen_names`.
    """
    named = hugging_face_names(config) if config.train.freeze else None
    if named is not None:
        frozen_names(config, named)


def hugging_face_names(config: RunConfig) -> dict[str, tuple[str, ...]] | None:
    """Megatron-Core's global name of each parameter of the model -> its Hugging Face tensors; None if no family can
    express the architecture."""
    try:
        form = export_format(config, config.arch.vocab_size or 1)  # the names do not depend on it
    except UnsupportedModel:
        return None
    table = form.family.parameters(form.arch).items()
    return {name: tuple(mapping.shapes()) for name, mapping in table if not name.endswith("expert_bias")}  # a buffer


def frozen_names(config: RunConfig, named: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The parameters that `train.freeze` names.

    Args:
        named: Megatron-Core's global name of each parameter of the whole model -> its Hugging Face tensors.

    Raises:
        ConfigError: a pattern matches nothing, or only some of the tensors of a parameter; or nothing is left to train.
    """
    patterns = config.train.freeze
    known = [*named, *(name for theirs in named.values() for name in theirs)]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in known):
            modules = {name.rpartition(".")[0] for name in known}
            hint = did_you_mean(pattern, [*known, *modules]) or _examples(named)
            refuse(config, _KEY, f"{pattern} matches no parameter of the model{hint}")
    frozen = set()
    for name, theirs in named.items():
        hit = [tensor for tensor in theirs if any(_matches(tensor, pattern) for pattern in patterns)]
        if any(_matches(name, pattern) for pattern in patterns) or (theirs and len(hit) == len(theirs)):
            frozen.add(name)
        elif hit:
            missing = [tensor for tensor in theirs if tensor not in hit]
            refuse(
                config,
                _KEY,
                f"{hit[0]} matches and {missing[0]} does not, but both are parts of one parameter, {name}; freeze all "
                "of its parts or none",
            )
    if len(frozen) == len(named):
        refuse(config, _KEY, f"all {len(named)} parameters of the model match, so nothing is trained")
    return frozen


def trained_shape(config: RunConfig, vocab_size: int) -> ModelShape:
    """The run's model, with the parameters that are trained and the factors of its adapter.

    Raises:
        UnsupportedModel, ConfigError: as `layers_with_adapters` and `frozen_names`.
    """
    shape = model_shape(config, vocab_size)
    if config.adapter.adapter_type != "none":
        return _adapted_shape(config, shape)
    if not config.train.freeze:
        return shape
    named = hugging_face_names(config)
    if named is not None:
        return replace(shape, trained=frozenset(named.keys() - frozen_names(config, named)))
    patterns = config.train.freeze  # of a model that no family expresses, names of Megatron-Core
    trained = {name for name in parameter_names(shape) if not any(_matches(name, pattern) for pattern in patterns)}
    return replace(shape, trained=frozenset(trained))


def _adapted_shape(config: RunConfig, shape: ModelShape) -> ModelShape:
    layers, hf_format = layers_with_adapters(config, shape.vocab_size), export_format(config, shape.vocab_size)
    parameters = adapter_family(hf_format.family, layers, config.adapter).parameters(hf_format.arch)
    factors = {
        name: math.prod(mapping.local_shape(1))
        for name, mapping in parameters.items()
        if f"{ADAPTER}." in name and ".lora_magnitude_" not in name
    }
    trained = frozenset(name for name in parameters if f"{ADAPTER}.initial_" not in name)
    return replace(shape, trained=trained, factors=factors)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _examples(named: Mapping[str, tuple[str, ...]]) -> str:
    ours, theirs = next(
        ((ours, theirs) for ours, theirs in named.items() if ".layers." in ours), next(iter(named.items()))
    )
    names = f"{theirs[0]} or {ours}" if theirs else ours
    return f"; a name is, for instance, {names}"
