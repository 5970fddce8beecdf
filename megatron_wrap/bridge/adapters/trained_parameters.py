"""The parameters that a run trains: all, those that `train.freeze` leaves, or those of its adapter; and their numbers.
Needs neither torch nor Megatron-Core."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from megatron_wrap.bridge.adapters.run_adapter import RunAdapter, run_adapter
from megatron_wrap.bridge.adapters.target_modules import refuse_unknown_tokens
from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.bridge.mapping.family import ADAPTER, Family
from megatron_wrap.bridge.mapping.tensors import tensor_shapes
from megatron_wrap.config.checks.contradictions import refuse
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import UnsupportedModel
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.nearest_names import did_you_mean
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
        hf_format = export_format(config, config.arch.vocab_size or 1)  # the names do not depend on it
    except UnsupportedModel:
        return None
    return {
        name: tuple(mapping.shapes())
        for name, mapping in hf_format.parameters.items()
        if not name.endswith("expert_bias")  # a buffer
    }


def frozen_names(config: RunConfig, named: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The parameters that `train.freeze` names.

    Args:
        named: Megatron-Core's global name of each parameter of the whole model -> its Hugging Face tensors.

    Raises:
        ConfigError: a pattern matches nothing, or only some of the tensors of a parameter; or nothing is left to train.
    """
    patterns = config.train.freeze
    known = [*named, *(tensor for tensors in named.values() for tensor in tensors)]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in known):
            modules = {name.rpartition(".")[0] for name in known}
            hint = did_you_mean(pattern, [*known, *modules]) or _examples(named)
            refuse(config, _KEY, f"{pattern} matches no parameter of the model{hint}")
    frozen = set()
    for name, tensors in named.items():
        matching = [tensor for tensor in tensors if any(_matches(tensor, pattern) for pattern in patterns)]
        if any(_matches(name, pattern) for pattern in patterns) or (tensors and len(matching) == len(tensors)):
            frozen.add(name)
        elif matching:
            missing = [tensor for tensor in tensors if tensor not in matching]
            refuse(
                config,
                _KEY,
                f"{matching[0]} matches and {missing[0]} does not, but both are parts of one parameter, {name}; freeze "
                "all of its parts or none",
            )
    if len(frozen) == len(named):
        refuse(config, _KEY, f"all {len(named)} parameters of the model match, so nothing is trained")
    return frozen


def trained_shape(config: RunConfig, vocab_size: int, adapter: RunAdapter | None = None) -> ModelShape:
    """The run's model, with the parameters that are trained and the factors of its adapter.

    Args:
        adapter: of the run; None: derived here, if the run has one.

    Raises:
        UnsupportedModel, ConfigError: as `run_adapter` and `frozen_names`.
    """
    shape = model_shape(config, vocab_size)
    adapter = adapter or run_adapter(config, vocab_size)
    if adapter is not None:
        return _adapted_shape(adapter, shape)
    if not config.train.freeze:
        return shape
    named = hugging_face_names(config)
    if named is not None:
        return replace(shape, trained=frozenset(named.keys() - frozen_names(config, named)))
    patterns = config.train.freeze  # of a model that no family expresses, names of Megatron-Core
    trained = {name for name in parameter_names(shape) if not any(_matches(name, pattern) for pattern in patterns)}
    return replace(shape, trained=frozenset(trained))


def _adapted_shape(adapter: RunAdapter, shape: ModelShape) -> ModelShape:
    parameters = adapter.family().parameters(adapter.hf_format.arch)
    factors = {
        name: math.prod(mapping.local_shape(1))
        for name, mapping in parameters.items()
        if f"{ADAPTER}." in name and ".lora_magnitude_" not in name
    }
    trained = frozenset(name for name in parameters if f"{ADAPTER}.initial_" not in name)
    return replace(shape, trained=trained, factors=factors)


def describe_adapter(adapter: RunAdapter, vocab_size: int | None) -> str:
    """One line: the numbers of adapted modules, of trainable and of all parameters of the whole model.

    Args:
        vocab_size: of the model; None: not known, then the line ends after the trainable parameters, or before them if
            they include an embedding.

    Raises:
        ConfigError: a row is outside the vocabulary.
    """

    def size(family: Family) -> int:
        return sum(math.prod(shape) for shape in family.shapes(adapter.hf_format.arch).values())

    trainable = size(adapter.family(converted=False))
    total = size(adapter.hf_format.family) + trainable
    modules = [module for layer in adapter.layers for module in layer.modules]
    line = f"LoRA on {len(modules)} modules ({', '.join(sorted({module.key for module in modules}))})"
    if adapter.rows:
        indices = {index for indices in adapter.rows.values() for index in indices}
        line += f", {counted(len(indices), 'row')} of tokens"
        if vocab_size is not None:
            refuse_unknown_tokens(adapter.rows, vocab_size)
    if adapter.saved:
        names = [name.split(".") for mapping in adapter.saved.values() for name in mapping.shapes()]
        owners = {name[-2] if name[-1] == "weight" else "biases" for name in names}
        line += f", trained whole: {', '.join(sorted(owners))}"
    if vocab_size is None and any(mapping.padded for mapping in adapter.saved.values()):
        return line
    line += f": trainable params: {trainable:,}"
    if vocab_size is None:
        return line
    return f"{line} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}"


def adapter_lines(adapter: RunAdapter, vocab_size: int | None) -> list[str]:
    """The line of `describe_adapter`, and one for each name and rank of adapted modules, in model order.

    Raises:
        ConfigError: as `describe_adapter`.
    """
    modules: Counter[tuple[str, int]] = Counter()
    parameters: Counter[tuple[str, int]] = Counter()
    for layer in adapter.layers:
        shapes = tensor_shapes(layer.factors())
        for module in layer.modules:
            kind = module.key, module.rank
            modules[kind] += 1
            for letter in "AB":
                parameters[kind] += math.prod(shapes[f"{layer.file_stem(module)}.lora_{letter}.weight"])
    kinds = [
        f"{key}: {counted(count, 'module')}, rank {rank}, {counted(parameters[key, rank], 'parameter')}"
        for (key, rank), count in modules.items()
    ]
    return [describe_adapter(adapter, vocab_size), *kinds]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _examples(named: Mapping[str, tuple[str, ...]]) -> str:
    name, tensors = next((item for item in named.items() if ".layers." in item[0]), next(iter(named.items())))
    names = f"{tensors[0]} or {name}" if tensors else name
    return f"; a name is, for instance, {names}"
