"""The run of a trained model, which exports, generates or scores: from a Hugging Face folder or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.adapters.peft_folder import adapter_base, adapter_keys, is_adapter
from megatron_wrap.bridge.loading.hub import local_folder, read_run_content
from megatron_wrap.bridge.loading.weight_folder import WEIGHT_FILES
from megatron_wrap.checkpoint.files.run_folder import RESOLVED
from megatron_wrap.checkpoint.saved_run import existing_checkpoint, read_saved_run
from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.hugging_face import CONFIG_FILES, read_hugging_face_config, resolve_folder
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.errors import CheckpointError, ConfigError

SOURCES = "Hugging Face folder or hub id, or a checkpoint: YAML of a run, folder of its checkpoints, or one checkpoint"
"""Description of the sources of `read_model`, for the help of commands."""
_DEFAULT_LENGTH = 2048
"""Default seq_length of a model whose config.json has no max_position_embeddings."""
_PROVIDER_KEY = f"{SECTION_PATHS['model_provider']}.provider_key"
_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
"""dtype of a config.json -> file of the configuration tree; others are computed in fp32."""


def read_model(source: str, overrides: Sequence[str] = (), num_processes: int = 1) -> RunConfig:
    """The run of a trained model, in the precision of its weights.

    Args:
        source: see `SOURCES`.
        overrides: `a.b.c=value`, such as a layout; they take precedence.
        num_processes: number of processes that the run will have.

    Raises:
        ConfigError, CheckpointError: there is no such model.
    """
    if os.path.isfile(source) or (os.path.isdir(source) and not _has_model(source)):
        content = checkpoint_content(checkpoint_of(source), provider_key=named_provider(source, overrides))
    else:
        content = _folder_content(source)
    content["megatron_lm"]["train"]["common"]["global_batch_size"] = num_processes  # divisible on each layout
    return read_run_content(content, overrides)


def _has_model(folder: str) -> bool:
    return Path(folder, "config.json").is_file() or is_adapter(folder)


def checkpoint_of(run_or_checkpoint: str) -> Path:
    """The checkpoint that a path means: the newest one of a run's YAML or of a folder, or the checkpoint itself.

    Raises:
        CheckpointError: there is none.
    """
    folder = run_or_checkpoint
    if os.path.isfile(folder):
        save = load_run_config(folder).train.save
        if save is None:
            raise CheckpointError(f"{folder}: megatron_lm.train.common.save is null, so the run has no checkpoint")
        folder = save
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such run or checkpoint; name a run's YAML, or a folder of checkpoints")
    return existing_checkpoint(folder)


def named_provider(source: str, overrides: Sequence[str] = ()) -> str | None:
    """The model provider that an override or the YAML of a run names; None if neither does."""
    values = [value for key, _, value in (override.partition("=") for override in overrides) if key == _PROVIDER_KEY]
    if values:
        return values[-1]
    return load_run_config(source).model_provider.provider_key if os.path.isfile(source) else None


def checkpoint_content(
    checkpoint: Path, tokenizer: str | None = None, provider_key: str | None = None
) -> dict[str, Any]:
    """Content of the YAML of a run with the model of a checkpoint and no flow.

    Args:
        tokenizer: a folder or hub id instead of the tokenizer of the run that saved the checkpoint.
        provider_key: the model provider that the user names, from `named_provider`.

    Raises:
        CheckpointError: Megatron-LM saved the checkpoint, so nothing describes the model; or its model provider is
            Python code that the user does not name.
    """
    saved = read_saved_run(checkpoint)
    if saved is None:
        raise CheckpointError(
            f"{checkpoint}: has no {RESOLVED}, which describes the model; was it saved by Megatron-LM?"
        )
    saved_provider = saved.section("model_provider")["provider_key"]
    if ":" in str(saved_provider) and saved_provider != provider_key:
        raise CheckpointError(
            f"{checkpoint}: its model is built by {saved_provider}, Python code that is not part of the checkpoint and "
            "is imported only if you name it; give the YAML of the run that saved it, or, to chat and eval, "
            f"{_PROVIDER_KEY}={saved_provider}"
        )
    provider: dict[str, Any] = {"provider_key": saved_provider}
    hf_path = _if_present(saved.section("model_provider").get("hf_path"))
    if hf_path is not None:
        provider["hf_path"] = hf_path
    dtype = {"__select__": "fp32", "__override__": {key: saved.section("dtype")[key] for key in ("bf16", "fp16")}}
    common = {"seq_length": saved.section("train")["seq_length"], "load": str(checkpoint.absolute()), "finetune": True}
    content = content_without_flow(
        common, dtype, provider, tokenizer or _if_present(saved.section("data").get("tokenizer"))
    )
    arch = saved.arch_selection()
    if hf_path is not None:  # config.json's; the tokenizer lets it grow again
        arch["__override__"]["vocab_size"] = saved.section("arch")["vocab_size"]
    content["megatron_lm"]["model"] = {"arch": arch}
    if tokenizer is None and saved.section("data").get("new_tokens"):
        content["megatron_wrap"]["data"]["__override__"]["new_tokens"] = list(saved.section("data")["new_tokens"])
    adapter = saved.section("adapter")
    if adapter.get("adapter_type", "none") != "none":
        # the factors are in the checkpoint
        content["megatron_wrap"]["adapter"] = {"__select__": "lora", "__override__": {**adapter, "path": None}}
    return content


def _folder_content(source: str) -> dict[str, Any]:
    """Content of the YAML of a run with the weights of a Hugging Face folder, or of a peft adapter, and no flow."""
    if is_adapter(source):
        adapter = adapter_keys(source)
        content = _folder_content(adapter_base(source))
        content["megatron_wrap"]["adapter"] = {"__select__": "lora", "__override__": adapter}
        return content
    try:
        folder = str(local_folder(source, CONFIG_FILES + WEIGHT_FILES))
    except ConfigError as error:
        raise ConfigError(f"{source!r} is neither a checkpoint nor a Hugging Face folder: {error}") from error
    hf_config = read_hugging_face_config(folder)
    length = hf_config.arch_values.get("max_position_embeddings") or _DEFAULT_LENGTH
    dtype = hf_config.values.get("dtype") or hf_config.values.get("torch_dtype")
    return content_without_flow(
        {"seq_length": length},
        {"__select__": _DTYPES.get(str(dtype), "fp32")},
        {"hf_path": folder},
        folder if hf_config.has_tokenizer else None,
    )


def content_without_flow(
    common: Mapping[str, Any], dtype: Mapping[str, Any], provider: Mapping[str, Any], tokenizer: str | None = None
) -> dict[str, Any]:
    """Content of the YAML of a run that uses a model. Training settings are required, and not used.

    Args:
        common: keys of `megatron_lm.train.common`, at least seq_length.
        dtype: the section `megatron_lm.train.dtype`.
        provider: keys of `megatron_wrap.model_provider`.
        tokenizer: folder or hub id.
    """
    from megatron_wrap.flow.entry import NO_FLOW

    return {
        "megatron_lm": {
            "train": {
                "common": {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1, **common},
                "learning-rate": {"lr": 0.0},
                "dtype": dtype,
            },
        },
        "megatron_wrap": {
            "model_provider": {"__override__": provider},
            "data": {"__select__": "none", "__override__": {"tokenizer": tokenizer}},
            "flow": {"__select__": "custom", "__override__": {"flow_key": NO_FLOW}},
        },
    }


def _if_present(path_or_id: str | None) -> str | None:
    """The folder, or the hub id if it is in the local cache; None if it no longer exists."""
    if path_or_id is not None:
        with suppress(ConfigError):
            resolve_folder(path_or_id)
            return path_or_id
    return None
