"""The Hugging Face folder that a run starts from (`model_provider.hf_path`), validated against the architecture."""

from __future__ import annotations

import os

from megatron_wrap.bridge.family import Family
from megatron_wrap.bridge.hub import local_folder
from megatron_wrap.bridge.source import PICKLE_FILES, WEIGHT_FILES, WeightSource
from megatron_wrap.bridge.value_model import family_of_model
from megatron_wrap.config.hugging_face import CONFIG_FILES, HF_PATH, read_hugging_face_config
from megatron_wrap.config.schema import RunConfig
from megatron_wrap.errors import CheckpointError


def check_hugging_face(config: RunConfig) -> None:
    """Validate the weights of a local folder from their headers, before any process starts. Weights of a hub id are
    downloaded and validated when the model is built.

    Raises:
        ConfigError, CheckpointError: as `hugging_face_source`.
    """
    path = config.model_provider.hf_path
    if path is not None and os.path.isdir(os.path.expanduser(path)):
        hugging_face_source(config)


def hugging_face_source(config: RunConfig) -> tuple[Family, WeightSource] | None:
    """The family and the weights of `hf_path`, validated but not read; None if the run has no hf_path.

    Raises:
        ConfigError, CheckpointError: a file is missing or damaged, or a tensor is missing, unexpected or of another
            shape.
    """
    provider = config.model_provider
    if provider.hf_path is None:
        return None
    family = family_of_model(config, read_hugging_face_config(provider.hf_path).family)
    patterns = CONFIG_FILES + WEIGHT_FILES + (PICKLE_FILES if provider.hf_allow_pickle else ())
    source = WeightSource(local_folder(provider.hf_path, patterns), family, provider.hf_allow_pickle)
    try:
        source.check(family, config.arch)
    except CheckpointError as error:
        raise CheckpointError(f"{HF_PATH}: {error}") from error
    return family, source


def weights_left_out(config: RunConfig) -> list[str]:
    """Warnings about weights of `hf_path` that are not read."""
    found = hugging_face_source(config)
    return [] if found is None else found[1].left_out(found[0], config.arch)
