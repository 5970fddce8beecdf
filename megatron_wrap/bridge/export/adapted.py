"""The modules of a run's model that get adapters, their sizes, and the folder that their factors start from. Needs
neither torch nor Megatron-Core."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.bridge.loading.adapter_folder import open_adapter, read_adapter_config, saved_adapter
from megatron_wrap.bridge.loading.weight_folder import WeightFolder, folder_digest
from megatron_wrap.bridge.mapping.adapter_targets import (
    AdaptedLayer,
    adapted_layers,
    adapter_family,
    saved_parameters,
)
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.bridge.mapping.token_rows import refuse_unknown_tokens, trained_rows
from megatron_wrap.config.hugging_face import resolve_folder
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import CheckpointError, ConfigError
from megatron_wrap.metrics.number_format import counted


def layers_with_adapters(config: RunConfig, vocab_size: int | None = None) -> list[AdaptedLayer]:
    """The linear layers of the whole model that get adapters, in model order; none without `megatron_wrap.adapter`.

    Args:
        vocab_size: of the model; None: that of the configuration. The factors of adapters do not depend on it.

    Raises:
        UnsupportedModel: no Hugging Face family can express the architecture, so its modules have no names.
        ConfigError: a pattern matches no module.
    """
    if config.adapter.adapter_type == "none":
        return []
    hf_format = export_format(config, vocab_size or config.arch.vocab_size or 1)
    return adapted_layers(hf_format.family.parameters(hf_format.arch), config.adapter)


def adapter_folder(config: RunConfig, layers: list[AdaptedLayer], vocab_size: int | None = None) -> WeightFolder | None:
    """The files of `adapter.path`, after a comparison with the layers; None without that key.

    Raises:
        CheckpointError: they cannot be read, or are of another base, other modules or ranks.
    """
    path, hf_path = config.adapter.path, config.model_provider.hf_path
    if path is None:
        return None
    if hf_path is not None:
        _refuse_another_base(path, hf_path)
    hf_format = export_format(config, vocab_size or config.arch.vocab_size or 1)
    return open_adapter(path, layers, config.adapter, hf_format.family, hf_format.arch)


def with_other_adapter(config: RunConfig, name: str) -> RunConfig:
    """The run's configuration with an adapter of `adapter.others` as the trained one, whose folder is `adapter.path`.

    Raises:
        CheckpointError: its adapter_config.json cannot be read, or it has more than factors.
    """
    assert config.adapter.others is not None
    folder = config.adapter.others[name]
    adapter = replace(saved_adapter(folder), base_weights=config.adapter.base_weights)
    more = adapter.modules_to_save or adapter.target_parameters or adapter.trainable_token_indices
    if more or adapter.bias != "none":
        raise CheckpointError(
            f"{folder}: an adapter of megatron_wrap.adapter.others has factors of linear layers alone; this one has "
            "modules_to_save, rows of tokens, biases or adapters of experts; merge it into a model of its own"
        )
    return replace(config, adapter=adapter)


def other_adapters(config: RunConfig) -> dict[str, dict[str, str]]:
    """Name -> path and SHA-256 of the files of each adapter of `adapter.others`."""
    facts = {}
    for name, folder in (config.adapter.others or {}).items():
        digest = hashlib.sha256()
        for file in sorted(Path(folder).expanduser().glob("adapter_*")):
            digest.update(file.name.encode() + file.read_bytes())
        facts[name] = {"path": folder, "digest": digest.hexdigest()}
    return facts


def _refuse_another_base(folder: str, hf_path: str) -> None:
    """Compare the base that an adapter names with the run's base, if the files of both are on this machine."""
    named = read_adapter_config(folder).get("base_model_name_or_path")
    if not named or named == hf_path:
        return
    theirs, ours = _digest(named), _digest(hf_path)
    if theirs is not None and ours is not None and theirs != ours:
        raise CheckpointError(
            f"{folder} is an adapter of {named}, and megatron_wrap.model_provider.hf_path {hf_path} is another model: "
            f"its config.json or the headers of its weight files differ; set hf_path to {named}, or, if the weights "
            f"are the same, write {hf_path} as base_model_name_or_path into {folder}/adapter_config.json"
        )


def _digest(path_or_id: str) -> str | None:
    """`folder_digest` of a model; None if its weights are not on this machine."""
    try:
        folder = resolve_folder(path_or_id)
    except ConfigError:
        return None
    return folder_digest(folder) if any(folder.glob("*.safetensors")) else None


def describe_adapters(config: RunConfig, vocab_size: int | None) -> str:
    """One line: the numbers of adapted modules, of trainable and of all parameters of the whole model.

    Args:
        vocab_size: of the model; None: not known, then the line ends after the trainable parameters, or before them if
            they include an embedding.

    Raises:
        UnsupportedModel, ConfigError: as `layers_with_adapters`.
    """
    layers = layers_with_adapters(config, vocab_size)
    hf_format = export_format(config, vocab_size or 1)

    def size(family: Family) -> int:
        return sum(math.prod(shape) for shape in family.shapes(hf_format.arch).values())

    trainable = size(adapter_family(hf_format.family, layers, config.adapter, converted=False))
    total = size(hf_format.family) + trainable
    kinds = ", ".join(sorted({module.key for layer in layers for module in layer.modules}))
    count = sum(len(layer.modules) for layer in layers)
    line = f"LoRA on {count} modules ({kinds})"
    table = hf_format.family.parameters(hf_format.arch)
    rows = trained_rows(table, config.adapter)
    if rows:
        line += f", {counted(len({index for indices in rows.values() for index in indices}), 'row')} of tokens"
        if vocab_size is not None:
            refuse_unknown_tokens(rows, vocab_size)
    whole = saved_parameters(table, config.adapter)
    if whole:
        names = [name.split(".") for mapping in whole.values() for name in mapping.shapes()]
        owners = {name[-2] if name[-1] == "weight" else "biases" for name in names}
        line += f", trained whole: {', '.join(sorted(owners))}"
    if vocab_size is None and any(mapping.padded for mapping in whole.values()):
        return line
    line += f": trainable params: {trainable:,}"
    if vocab_size is None:
        return line
    return f"{line} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}"


def adapter_lines(config: RunConfig, vocab_size: int | None) -> list[str]:
    """The line of `describe_adapters`, and one for each name and rank of adapted modules, in model order; none without
    `megatron_wrap.adapter`.

    Raises:
        UnsupportedModel, ConfigError: as `layers_with_adapters`.
    """
    modules: Counter[tuple[str, int]] = Counter()
    parameters: Counter[tuple[str, int]] = Counter()
    for layer in layers_with_adapters(config, vocab_size):
        factors = layer.factors().values()
        shapes = {name: shape for factor in factors for name, shape in factor.shapes().items()}
        for module in layer.modules:
            kind = module.key, module.rank
            modules[kind] += 1
            for letter in "AB":
                parameters[kind] += math.prod(shapes[f"{layer.file_stem(module)}.lora_{letter}.weight"])
    if not modules:
        return []
    kinds = [
        f"{key}: {counted(count, 'module')}, rank {rank}, {counted(parameters[key, rank], 'parameter')}"
        for (key, rank), count in modules.items()
    ]
    return [describe_adapters(config, vocab_size), *kinds]
