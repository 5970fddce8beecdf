"""The Hugging Face folder that a run starts from (`model_provider.hf_path`), validated against the architecture."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.loading.hub import local_folder
from megatron_wrap.bridge.loading.weight_folder import PICKLE_FILES, WEIGHT_FILES, WeightFolder
from megatron_wrap.bridge.mapping.family import family_of_model
from megatron_wrap.config.hugging_face import CONFIG_FILES, HF_PATH, read_generation_config, read_hugging_face_config
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.chat.tokenizer import NewTokens, load_tokenizer, new_tokens, run_tokenizer
from megatron_wrap.errors import CheckpointError, DataError, UnsupportedModel


def check_hugging_face(config: RunConfig) -> None:
    """Validate the weights of a local folder from their headers, before any process starts. Weights of a hub id are
    downloaded and validated when the model is built. generation_config.json, which generation and exports read, is
    validated as well.

    Raises:
        ConfigError, CheckpointError: as `starting_weights`.
    """
    path = config.model_provider.hf_path
    if path is not None and os.path.isdir(os.path.expanduser(path)):
        starting_weights(config)
        read_generation_config(Path(path).expanduser())


def starting_weights(config: RunConfig) -> WeightFolder | None:
    """The weights of `hf_path`, validated but not read; None if the run has no hf_path.

    Raises:
        ConfigError, CheckpointError: a file is missing or damaged, or a tensor is missing, unexpected or of another
            shape.
    """
    provider = config.model_provider
    if provider.hf_path is None:
        return None
    of_folder = read_hugging_face_config(provider.hf_path)
    family = family_of_model(config, of_folder.family)
    if (config.arch.mtp_num_layers or 0) > family.max_prediction_layers:
        key = "megatron_lm.model.arch.mtp_num_layers"
        raise UnsupportedModel(
            f"{config.located(key)}: {config.arch.mtp_num_layers} layers for multi-token prediction of "
            f"{family.model_type} are not supported; set it to {family.max_prediction_layers or 'null'}"
        )
    patterns = CONFIG_FILES + WEIGHT_FILES + (PICKLE_FILES if provider.hf_allow_pickle else ())
    folder = local_folder(provider.hf_path, patterns)
    try:
        weights = WeightFolder(folder, family, provider.hf_allow_pickle, of_folder.quantization)
        weights.check(folder_arch(config))
    except CheckpointError as error:
        raise CheckpointError(f"{HF_PATH}: {error}") from error
    return weights


def tokens_new_to_folder(config: RunConfig, tokenizer: Any, vocab_size: int) -> NewTokens | None:
    """Tokens of the run's tokenizer that the model of `hf_path` was not trained with: those that the folder's own
    tokenizer does not have, even if the model has rows for them. If the folder has no tokenizer that can be loaded,
    `data.tokenizer` without new_tokens replaces it. Opens no connection.

    Args:
        tokenizer: of the run, or None.
        vocab_size: of the run's model, without padding.
    """
    num_rows = None if config.model_provider.hf_path is None else folder_arch(config).vocab_size
    if tokenizer is None or num_rows is None:
        return None
    folder, original = read_hugging_face_config(str(config.model_provider.hf_path)), None
    if folder.has_tokenizer:
        with contextlib.suppress(DataError):
            original = load_tokenizer(folder.folder)
    original = original or run_tokenizer(replace(config.data, new_tokens=()))
    return new_tokens(tokenizer, original, num_rows, vocab_size)


def folder_arch(config: RunConfig) -> ArchConfig:
    """The architecture with the vocabulary of the folder, which the model's may exceed."""
    assert config.model_provider.hf_path is not None
    size = read_hugging_face_config(config.model_provider.hf_path).values.get("vocab_size")
    vocab_size = config.arch.vocab_size
    return (
        replace(config.arch, vocab_size=size)
        if isinstance(size, int) and vocab_size and size < vocab_size
        else config.arch
    )
