"""The folder of a peft adapter, compared with the run's adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.bridge.mapping.adapter_targets import (
    SEQUENCE_CLASSIFICATION,
    AdaptedLayer,
    adapted_experts,
    adapter_family,
    peft_config,
    saved_parameters,
    task_type,
)
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.bridge.mapping.token_rows import as_in_peft, trained_rows
from megatron_wrap.config.reading.json_file import read_json
from megatron_wrap.config.reading.yaml_nodes import describe, inline_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import AdapterConfig, ArchConfig
from megatron_wrap.errors import CheckpointError

CONFIG = "adapter_config.json"
REFUSED = {
    "lora_bias": "factors have no biases",
    "layer_replication": "the base has other layers",
    "alora_invocation_tokens": "an adapter applies to all tokens",
    "use_qalora": "inputs are not pooled in groups",
    "use_bdlora": "factors are not block-diagonal",
    "monteclora_config": "factors are not sampled",
    "kasa_config": "factors have no singular values between them",
    "velora_config": "activations are kept whole",
    "arrow_config": "adapters are not routed",
    "megatron_config": "the base has transformers' names, not those of Megatron-Core",
}
"""Options of peft that cannot be loaded -> the reason."""
REFUSED_INITIAL = {
    "pissa_niter": "factors of a randomized decomposition, other ones in each run; save it converted, by "
    "path_initial_model_for_weight_conversion",
    **dict.fromkeys(
        ("corda", "lora_ga"),
        "the factors belong to a changed base; save it converted, by path_initial_model_for_weight_conversion",
    ),
    "loftq": "the factors belong to a base that LoftQ quantized",
}
"""Beginnings of init_lora_weights whose folders cannot be loaded -> the reason."""
WITHOUT_EFFECT = (
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),  # of initial factors
    *("megatron_core", "qalora_group_size", "runtime_config"),
)
"""Options of peft that change nothing in a folder without the refused ones."""
CLASSIFIER_HEADS = ("classifier", "score")
"""Modules that peft adds to modules_to_save for a sequence classification model."""
_KEYS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias"),
    *("trainable_token_indices", "ensure_weight_tying"),
)
_DECOMPOSED = ("pissa", "olora")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _are_integers(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, list) and all(map(_is_integer, value)))


def _are_rows(value: Any) -> bool:
    lists = [value] if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [None]
    return all(isinstance(indices, list) and _are_integers(indices) for indices in lists)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, float) or _is_integer(each) for each in value.values())


_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("an integer of at least 1", lambda value: _is_integer(value) and value >= 1),
    "lora_alpha": ("a number", lambda value: _is_integer(value) or isinstance(value, float)),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), ("a text or a list of texts", _are_texts)),
    "target_parameters": ("a list of texts", lambda value: not isinstance(value, str) and _are_texts(value)),
    "modules_to_save": ("a list of texts", lambda value: not isinstance(value, str) and _are_texts(value)),
    "layers_to_transform": ("an integer or a list of integers", _are_integers),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ("a mapping to numbers", _are_numbers)),
    "bias": ("a text", lambda value: isinstance(value, str)),
    "trainable_token_indices": ("a list of integers, or a mapping to such lists", _are_rows),
    **dict.fromkeys(
        ("use_rslora", "use_dora", "ensure_weight_tying"), ("true or false", lambda value: isinstance(value, bool))
    ),
}
"""Key -> its type in words, and the test of a value other than null."""
_SAME = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")


def read_adapter_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Content of adapter_config.json.

    Raises:
        CheckpointError: it is missing, damaged, or not that of a LoRA adapter without further parts.
    """
    path = Path(folder).expanduser() / CONFIG
    values = read_json(path, "set adapter.path to a folder of peft, or save the adapter again", CheckpointError)
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        kind = values.get("peft_type") if isinstance(values, dict) else None
        raise CheckpointError(f"{path}: peft_type is {kind}, and only LORA is supported")
    for key, (kind, holds) in _TYPES.items():
        if values.get(key) is not None and not holds(values[key]):
            raise CheckpointError(f"{path}: {key} must be {kind}, not {describe(values[key])}; save the adapter again")
    for key, reason in REFUSED.items():
        if values.get(key):
            raise CheckpointError(f"{path}: {key} is {describe(values[key])} and cannot be loaded: {reason}")
    initial = values.get("init_lora_weights")
    for kind, reason in REFUSED_INITIAL.items():
        if isinstance(initial, str) and initial.lower().startswith(kind):
            raise CheckpointError(f"{path}: init_lora_weights is {initial} and cannot be loaded: {reason}")
    return values


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder contains a peft adapter."""
    return os.path.isfile(os.path.join(folder, CONFIG))


def adapter_base(folder: str | os.PathLike[str]) -> str:
    """Folder or hub id of the model that an adapter was trained for.

    Raises:
        CheckpointError: as `read_adapter_config`, or the adapter does not name it.
    """
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{Path(folder) / CONFIG} names no base_model_name_or_path; write the folder of the model there, or set "
            "megatron_wrap.model_provider.hf_path to it and megatron_wrap.adapter.path to this folder"
        )
    return base


def adapter_keys(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Keys of `megatron_wrap.adapter` with which a run loads an adapter.

    Raises:
        CheckpointError: as `read_adapter_config`.
    """
    theirs = read_adapter_config(folder)
    keys = {name: theirs[name] for name in _KEYS if theirs.get(name)}
    if isinstance(keys.get("layers_to_transform"), int):
        keys["layers_to_transform"] = [keys["layers_to_transform"]]
    if theirs.get("init_lora_weights") in _DECOMPOSED:
        keys["init_lora_weights"] = theirs["init_lora_weights"]
    saved = saved_modules(theirs)
    return {**keys, **({"modules_to_save": saved} if saved else {}), "path": os.fspath(folder)}


def saved_modules(values: Mapping[str, Any]) -> list[str]:
    """modules_to_save of adapter_config.json, without the heads that peft adds."""
    return [name for name in values.get("modules_to_save") or () if name not in CLASSIFIER_HEADS]


def open_adapter(
    folder: str | os.PathLike[str],
    layers: Sequence[AdaptedLayer],
    config: AdapterConfig,
    family: Family,
    arch: ArchConfig,
) -> WeightFolder:
    """The factors in a folder of peft; names and shapes are those of `layers`.

    Raises:
        CheckpointError: a file cannot be read; the adapter is of a model with a scalar head and this run's model has
            none, or the reverse; it has other ranks, scales or modules than `megatron_wrap.adapter`, or a factor is
            missing.
    """
    theirs, task = read_adapter_config(folder), task_type(family)
    of_scores = theirs.get("task_type") == SEQUENCE_CLASSIFICATION
    if of_scores != (task == SEQUENCE_CLASSIFICATION):
        kind = "a sequence classification model" if of_scores else "a language model"
        provider = derived.VALUE_PROVIDER if of_scores else "gpt_model"
        raise CheckpointError(
            f"{folder}: task_type is {theirs.get('task_type')}, an adapter of {kind}; set "
            f"megatron_wrap.model_provider.provider_key to {provider}, or load another adapter"
        )
    _compare_initial(folder, theirs.get("init_lora_weights"), config)
    ours = peft_config(layers, config, None, task, converted=False)
    for key in _SAME:
        saved = theirs.get(key, ours[key] if key in ("r", "lora_alpha") else type(ours[key])())
        if (saved or None) != (ours[key] or None):
            raise _differs(folder, key, saved, ours[key])
    bias = theirs.get("bias", "none")
    if bias != config.bias:
        raise _differs(folder, "bias", bias, config.bias)
    _compare_rows(folder, theirs, config, family, arch)
    targets = tuple(theirs.get("target_parameters") or ())
    chosen = (adapted_experts(family.parameters(arch), replace(config, target_parameters=targets)), layers)
    if len({frozenset(layer.name for layer in of if layer.experts) for of in chosen}) > 1:
        raise _differs(folder, "target_parameters", _listed(targets), _listed(config.target_parameters))
    table, theirs_whole = family.parameters(arch), replace(config, modules_to_save=tuple(saved_modules(theirs)))
    if saved_parameters(table, theirs_whole).keys() != saved_parameters(table, config).keys():
        saved, here = _listed(theirs_whole.modules_to_save), _listed(config.modules_to_save)
        raise _differs(folder, "modules_to_save", saved, here)
    files = WeightFolder(Path(folder).expanduser(), adapter_family(family, layers, config, converted=False))
    files.check(arch)
    return files


def _differs(folder: str | os.PathLike[str], key: str, saved: Any, here: Any) -> CheckpointError:
    """The error about an option that is another one in the folder."""
    return CheckpointError(
        f"{folder}: {key} is {saved} there and {here} here; write megatron_wrap.adapter.{key}={saved}"
    )


def _listed(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def _compare_rows(
    folder: str | os.PathLike[str], theirs: Mapping[str, Any], config: AdapterConfig, family: Family, arch: ArchConfig
) -> None:
    """Trained rows of tokens, which have their order in the file."""
    table, saved = family.parameters(arch), theirs.get("trainable_token_indices") or ()
    wanted = tuple(saved) if isinstance(saved, list) else saved
    if trained_rows(table, replace(config, trainable_token_indices=wanted)) != trained_rows(table, config):
        here = inline_yaml(as_in_peft(config) or [])
        raise _differs(folder, "trainable_token_indices", inline_yaml(saved or []), here)


def _compare_initial(folder: str | os.PathLike[str], theirs: Any, config: AdapterConfig) -> None:
    """Factors of PiSSA and OLoRA belong to a base without the product of the initial ones, others to the base."""
    saved = theirs if theirs in _DECOMPOSED else "true"
    if saved != (config.init_lora_weights if config.decomposes_base else "true"):
        raise CheckpointError(
            f"{folder}: init_lora_weights is {theirs} there and {config.init_lora_weights} here; write "
            f"megatron_wrap.adapter.init_lora_weights={saved}"
        )
