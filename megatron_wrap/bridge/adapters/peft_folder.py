"""Folders of peft adapters: their options, compared with those of the run, and the files of their factors. Needs no
torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from megatron_wrap.bridge.adapters.run_adapter import SEQUENCE_CLASSIFICATION, RunAdapter
from megatron_wrap.bridge.loading.weight_folder import ADAPTER_CONFIG, WeightFolder, folder_digest
from megatron_wrap.config.config_json import read_json
from megatron_wrap.config.hugging_face import resolve_folder
from megatron_wrap.config.reading.yaml_nodes import describe, inline_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.keys import Mismatch, check_value, key_ranges
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import CheckpointError, ConfigError

_CHANGED_BASE = "the factors belong to a changed base; save it converted, by path_initial_model_for_weight_conversion"
REFUSED = {
    "lora_bias": "factors have no biases",
    "layer_replication": "the base has other layers",
    "layers_pattern": "layers_to_transform counts in the only list of layers; delete it, if it names that",
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
    **dict.fromkeys(("olora", "corda", "lora_ga"), _CHANGED_BASE),
    "loftq": "the factors belong to a base that LoftQ quantized",
}
"""Prefixes of init_lora_weights whose folders cannot be loaded -> the reason."""
WITHOUT_EFFECT = (
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),  # of initial factors
    *("megatron_core", "qalora_group_size", "runtime_config"),
)
"""Options of peft without effect in a folder that has none of the refused options."""
CLASSIFIER_HEADS = ("classifier", "score")
"""Modules that peft adds to modules_to_save for a sequence classification model."""
_COMPARED = (
    *("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "trainable_token_indices"),
    *("target_parameters", "modules_to_save"),
)
"""Keys that a folder and a run must agree on; the names of the tensors are compared as well."""
_KEYS = (
    *("lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "ensure_weight_tying"),
    *_COMPARED,
)
"""Keys of `AdapterConfig` that are options of peft with the same meaning, except for init_lora_weights."""
_EXPERT_FILES = (0, 19)
"""The release of peft that introduced the present format of experts' factors; earlier ones exchange A and B."""


def read_adapter_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Content of adapter_config.json.

    Raises:
        CheckpointError: it is missing, damaged, or not that of a LoRA adapter without further parts.
    """
    path = Path(folder).expanduser() / ADAPTER_CONFIG
    values = read_json(path, "set adapter.path to a folder of peft, or save the adapter again", CheckpointError)
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        kind = values.get("peft_type") if isinstance(values, dict) else None
        raise CheckpointError(f"{path}: peft_type is {kind}, and only LORA is supported")
    if isinstance(values.get("layers_to_transform"), int):
        values["layers_to_transform"] = [values["layers_to_transform"]]
    _check_types(path, values)
    for key, reason in REFUSED.items():
        if values.get(key):
            raise CheckpointError(f"{path}: {key} is {describe(values[key])} and cannot be loaded: {reason}")
    initial = values.get("init_lora_weights")
    for kind, reason in REFUSED_INITIAL.items():
        if isinstance(initial, str) and initial.lower().startswith(kind):
            raise CheckpointError(f"{path}: init_lora_weights is {initial} and cannot be loaded: {reason}")
    return values


def _check_types(path: Path, values: Mapping[str, Any]) -> None:
    """Compare the values of `_KEYS`, unless they are null, with the types and ranges of `AdapterConfig`."""
    hints, ranges = get_type_hints(AdapterConfig), key_ranges(AdapterConfig)
    for key in _KEYS:
        value, allowed = values.get(key), ranges.get(key)
        if value is None:
            continue
        try:
            check_value(value, hints[key])
            if allowed is not None and not allowed.holds(value):
                raise Mismatch(f"must be {allowed}")
            if key.endswith("_pattern"):
                check_value([*value.values()], tuple[float, ...])
        except Mismatch as mismatch:
            raise CheckpointError(f"{path}: {key} {mismatch}, not {describe(value)}; save the adapter again") from None


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder contains a peft adapter."""
    return os.path.isfile(os.path.join(folder, ADAPTER_CONFIG))


def adapter_base(folder: str | os.PathLike[str]) -> str:
    """Folder or hub id of the model that an adapter was trained for.

    Raises:
        CheckpointError: as `read_adapter_config`, or the adapter does not name it.
    """
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{Path(folder) / ADAPTER_CONFIG} names no base_model_name_or_path; write the folder of the model there, "
            "or set megatron_wrap.model_provider.hf_path to it and megatron_wrap.adapter.path to this folder"
        )
    return base


def adapter_keys(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Keys of `megatron_wrap.adapter` with which a run loads an adapter, as JSON values.

    Raises:
        CheckpointError: as `read_adapter_config`.
    """
    values = read_adapter_config(folder)
    saved = [name for name in values.get("modules_to_save") or () if name not in CLASSIFIER_HEADS]
    keys = {name: value for name in _KEYS if (value := {**values, "modules_to_save": saved}.get(name))}
    if values.get("init_lora_weights") == "pissa":
        keys["init_lora_weights"] = "pissa"
    return {**keys, "path": os.fspath(folder)}


def saved_adapter(folder: str | os.PathLike[str]) -> AdapterConfig:
    """The adapter of a folder.

    Raises:
        CheckpointError: as `read_adapter_config`.
    """
    keys: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in adapter_keys(folder).items()
    }
    return AdapterConfig(adapter_type="lora", **keys)


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
    adapters = {}
    for name, folder in (config.adapter.others or {}).items():
        digest = hashlib.sha256()
        for file in sorted(Path(folder).expanduser().glob("adapter_*")):
            digest.update(file.name.encode() + file.read_bytes())
        adapters[name] = {"path": folder, "digest": digest.hexdigest()}
    return adapters


def adapter_folder(config: RunConfig, adapter: RunAdapter | None) -> WeightFolder | None:
    """The files of `adapter.path`, compared with the run's adapter; None without that key.

    Raises:
        CheckpointError: a file cannot be read, or the folder is of another base; the adapter is of a model with a
            scalar head and this run's model has none, or the reverse; it has other ranks, scales or modules than
            `megatron_wrap.adapter`, a form of peft before 0.19, or a factor is missing.
    """
    folder, hf_path = config.adapter.path, config.model_provider.hf_path
    if folder is None or adapter is None:
        return None
    if hf_path is not None:
        _refuse_another_base(folder, hf_path)
    values, saved = read_adapter_config(folder), saved_adapter(folder)
    has_scores = values.get("task_type") == SEQUENCE_CLASSIFICATION
    if has_scores != (adapter.task_type == SEQUENCE_CLASSIFICATION):
        kind = "a sequence classification model" if has_scores else "a language model"
        provider = derived.VALUE_PROVIDER if has_scores else "gpt_model"
        raise CheckpointError(
            f"{folder}: task_type is {values.get('task_type')}, an adapter of {kind}; set "
            f"megatron_wrap.model_provider.provider_key to {provider}, or load another adapter"
        )
    # factors of PiSSA belong to a base without the product of the initial ones, others to the base
    if saved.decomposes_base != adapter.config.decomposes_base:
        raise _differs(folder, "init_lora_weights", saved.init_lora_weights, adapter.config.init_lora_weights)
    for key in _COMPARED:
        there, here = getattr(saved, key), getattr(adapter.config, key)
        if _comparable(key, there) != _comparable(key, here):
            raise _differs(folder, key, there, here)
    version = str(values.get("peft_version") or "0.17")  # 0.18 is the first release that writes it
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _EXPERT_FILES and any(
        layer.experts and not layer.weight.transposed for layer in adapter.layers
    ):
        raise CheckpointError(
            f"{folder}: peft {version} saved it, and factors of experts have another form since 0.19; merge it with "
            "that release (merge_and_unload) and set megatron_wrap.model_provider.hf_path to the merged model"
        )
    files = WeightFolder(Path(folder).expanduser(), adapter.family(converted=False))
    files.check(adapter.hf_format.arch)
    return files


def _comparable(key: str, value: Any) -> Any:
    """A value in a form for comparison: peft writes names in another order, and null instead of empty values."""
    return sorted(value) if key in ("target_parameters", "modules_to_save") else value or None


def _differs(folder: str | os.PathLike[str], key: str, there: Any, here: Any) -> CheckpointError:
    """The error about an option that has another value in the folder."""
    saved, wanted = (inline_yaml(list(value) if isinstance(value, tuple) else value) for value in (there, here))
    return CheckpointError(
        f"{folder}: {key} is {saved} there and {wanted} here; write megatron_wrap.adapter.{key}={saved}"
    )


def _refuse_another_base(folder: str, hf_path: str) -> None:
    """Compare the base that an adapter names with the run's base, if the files of both are on this machine."""
    named = read_adapter_config(folder).get("base_model_name_or_path")
    if not named or named == hf_path:
        return
    named_digest, digest = _digest(named), _digest(hf_path)
    if named_digest is not None and digest is not None and named_digest != digest:
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
