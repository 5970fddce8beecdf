"""The adapter of a checkpoint, and the base that it needs, compared with the run's; needs neither torch nor
Megatron-Core."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.adapters.peft_folder import other_adapters
from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.bridge.loading.weight_folder import folder_digest
from megatron_wrap.checkpoint.files.hashed_files import find_damage, hash_files
from megatron_wrap.config.hugging_face import resolve_folder
from megatron_wrap.config.reading.yaml_nodes import inline_yaml
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import CheckpointError, ConfigError

_KEYS = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "rank_pattern", "alpha_pattern"),
    *("target_parameters", "use_rslora", "use_dora", "modules_to_save", "bias", "init_lora_weights"),
    "trainable_token_indices",
)
"""Keys of `megatron_wrap.adapter` that determine modules, ranks, scales and whether initial factors are kept; the other
keys may differ in a run that continues."""


def check_adapter(
    checkpoint: Path, has_adapter: bool, base: Mapping[str, Any] | None, config: RunConfig, continues: bool
) -> None:
    """Compare the adapter of a checkpoint, and the base that it needs, with the run's.

    Args:
        base: from `base_record`, of the Hugging Face folder that the checkpoint needs; None: it has all weights.
        continues: whether the optimizer is loaded as well.

    Raises:
        CheckpointError: one of them has an adapter and the other has none, or the base is another model.
    """
    adapted = config.adapter.adapter_type != "none"
    if has_adapter and not adapted:
        raise CheckpointError(
            f"{checkpoint} contains an adapter and this run has none; select megatron_wrap.adapter: lora with the "
            "options in its resolved.yaml, or load a merged model (save_pretrained(..., merge=True)) by hf_path"
        )
    if adapted and not has_adapter and continues:
        raise CheckpointError(
            f"{checkpoint} contains no adapter, so this run cannot continue it; to train an adapter for its weights "
            "set megatron_lm.train.common.finetune: true"
        )
    if adapted and not has_adapter:
        _refuse_to_begin_without_folder(checkpoint, config.adapter)
    if base is None:
        if adapted and config.adapter.base_weights != "bf16":
            raise CheckpointError(
                f"{checkpoint} contains all weights, and megatron_wrap.adapter.base_weights: "
                f"{config.adapter.base_weights} takes those of a Hugging Face folder alone; write bf16, or export the "
                "checkpoint and set megatron_wrap.model_provider.hf_path to its folder"
            )
        return
    hf_path = config.model_provider.hf_path
    needed = f"{checkpoint} contains an adapter of {base['path']} without the weights of that model"
    if hf_path is None:
        raise CheckpointError(f"{needed}; set megatron_wrap.model_provider.hf_path to it")
    original = "set megatron_wrap.model_provider.hf_path to the original folder"
    if folder_digest(resolve_folder(hf_path)) != base["digest"]:
        raise CheckpointError(
            f"{needed}, and {hf_path} is another model or was changed: the digest of its config.json and weight files' "
            f"headers differs; {original}"
        )
    hashes = base.get("hashes", {}) if config.adapter.base_digest == "weights" else {}
    if damage := find_damage(resolve_folder(hf_path), hashes):
        raise CheckpointError(f"{needed}, and in {hf_path} {damage}; {original}")


def _refuse_to_begin_without_folder(checkpoint: Path, adapter: AdapterConfig) -> None:
    """Refuse adapter settings that derive something from the weights of hf_path, if the run begins with those of a
    checkpoint."""
    section, causes = SECTION_PATHS["adapter"], []
    if adapter.decomposes_base:
        initial = f"{section}.init_lora_weights: {adapter.init_lora_weights}"
        causes.append((f"{initial} begins with factors of hf_path's weights", "or write true"))
    if adapter.trainable_token_indices:
        rows = f"{section}.trainable_token_indices begins with rows of hf_path's embedding"
        causes.append((rows, "or train without these rows"))
    if adapter.use_dora:
        norms = "DoRA begins with the norms of hf_path's weights"
        causes.append((norms, f"or write {section}.use_dora: false"))
    if causes:
        cause, otherwise = causes[0]
        raise CheckpointError(
            f"{checkpoint} contains no adapter, and {cause}; export it (megatron-wrap export-hf) and set "
            f"megatron_wrap.model_provider.hf_path to that folder, {otherwise}"
        )


def base_record(config: RunConfig) -> dict[str, Any]:
    """Path and digest of the run's base for a checkpoint; with `base_digest: weights` also the hashes of its weight
    files, for which a process reads them once."""
    hf_path = str(config.model_provider.hf_path)
    folder = resolve_folder(hf_path)
    record: dict[str, Any] = {"path": hf_path, "digest": folder_digest(folder)}
    if config.adapter.base_digest == "weights":
        record["hashes"] = _hashes_of_weights(folder)
    return record


@functools.cache
def _hashes_of_weights(folder: Path) -> dict[str, Any]:
    return hash_files(folder, sorted(path.name for path in folder.glob("*.safetensors")))


def check_others(checkpoint: Path, saved: Mapping[str, Mapping[str, str]], config: RunConfig) -> None:
    """Compare the frozen adapters of `adapter.others` with those that a checkpoint remembers.

    Raises:
        CheckpointError: one of the same name has another content.
    """
    for name, adapter in other_adapters(config).items():
        if name in saved and adapter["digest"] != saved[name]["digest"]:
            raise CheckpointError(
                f"{checkpoint} was trained with the frozen adapter {name} of {saved[name]['path']}, and "
                f"{adapter['path']} has another content; set megatron_wrap.adapter.others to the original, or give the "
                "new one another name"
            )


def check_saved_adapter(
    checkpoint: Path,
    saved_adapter: Mapping[str, Any],
    base: Mapping[str, Any] | None,
    config: RunConfig,
    continues: bool,
) -> None:
    """Run the checks of `check_adapter` and `compare_adapters` before any process starts. A base with a hub id is not
    downloaded yet, and not compared.

    Args:
        saved_adapter: `megatron_wrap.adapter` of the run that saved the checkpoint.
    """
    hf_path = config.model_provider.hf_path
    downloads = hf_path is not None and not os.path.isdir(os.path.expanduser(hf_path))
    has_adapter = saved_adapter.get("adapter_type", "none") != "none"
    check_adapter(checkpoint, has_adapter, None if downloads else base, config, continues)
    compare_adapters(checkpoint, saved_adapter, config)


def compare_adapters(checkpoint: Path, saved_adapter: Mapping[str, Any], config: RunConfig) -> None:
    """Compare the modules, ranks and scales of a checkpoint's adapter with those of the run, if both have one.

    Raises:
        CheckpointError: they differ; the message names each key that differs, with both values.
    """
    if "none" in (config.adapter.adapter_type, saved_adapter.get("adapter_type", "none")):
        return
    names = {field.name for field in fields(AdapterConfig)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in saved_adapter.items() if key in names
    }
    saved = AdapterConfig(**values)
    differing = [key for key in _KEYS if getattr(saved, key) != getattr(config.adapter, key)]
    if not differing:
        return
    try:
        here = _modules(config, config.adapter)
    except ConfigError:
        return  # the validation of the run's adapter reports its keys
    if _modules(config, saved) == here:
        return
    section = SECTION_PATHS["adapter"]
    texts, settings = [], []
    for key in differing:
        before, now = (inline_yaml(_plain(getattr(adapter, key))) for adapter in (saved, config.adapter))
        texts.append(f"{key} was {before} when it was saved and is {now} here")
        settings.append(f"{section}.{key}={before}")
    raise CheckpointError(
        f"{checkpoint} contains another adapter: {', '.join(texts)}; write {shlex.join(settings)}, or choose another "
        "load or save folder"
    )


def _modules(config: RunConfig, adapter: AdapterConfig) -> set[Any]:
    derived = run_adapter(replace(config, adapter=adapter))
    assert derived is not None
    modules = {module for layer in derived.layers for module in layer.modules}
    initial = {adapter.init_lora_weights} if adapter.decomposes_base else set()
    return modules | set(derived.saved) | set(derived.rows.items()) | initial


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
