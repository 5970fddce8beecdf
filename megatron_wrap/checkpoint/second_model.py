"""The configuration of the second model of `megatron_wrap.models`: the run's, with its own architecture.

Needs neither torch nor Megatron-Core, and is checked before any process starts.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.choose import complete
from megatron_wrap.bridge.hub import read_run
from megatron_wrap.bridge.start import check_hugging_face
from megatron_wrap.checkpoint.precheck import find_checkpoint
from megatron_wrap.checkpoint.store import RESOLVED, read_facts
from megatron_wrap.config import derived, load_resolved
from megatron_wrap.config.checks import check_values
from megatron_wrap.config.hugging_face import HF_PATH, TRAINING_KEYS, read_hugging_face_config
from megatron_wrap.config.schema import SECTION_PATHS, ArchConfig, ModelsConfig, RunConfig
from megatron_wrap.config.second_models import SecondModelConfig
from megatron_wrap.errors import CheckpointError, ConfigError, LayoutError, MegatronWrapError

if TYPE_CHECKING:
    from megatron_wrap.engine.state import TrainingState

_OF_THE_RUN = (
    *("make_vocab_size_divisible_by", "transformer_impl", "attention_softmax_in_fp32", "moe_grouped_gemm"),
    *("moe_token_dispatcher_type", *sorted(TRAINING_KEYS)),
)
"""Keys of the architecture that choose kernels and training, not the model: the second model takes the run's."""


def reference_config(config: RunConfig) -> RunConfig | None:
    """The run's configuration with the architecture of the second model; None if training needs none.

    Raises:
        ConfigError, LayoutError: the model does not fit the run's layout, or cannot follow the policy.
        CheckpointError: a folder is missing, or its weights are incomplete.
    """
    settings = config.models.second
    if settings is None or settings.precomputed is not None:
        return None
    return _with_source(config, settings)


def precompute_config(config: RunConfig) -> RunConfig:
    """A run whose only model is the second model of `config`, with its weights, for a forward pass. `copy`, and no
    reference: the policy before its first step.

    Raises:
        MegatronWrapError: as `reference_config`.
    """
    settings = config.models.second or SecondModelConfig(copy=True)
    found = _with_source(config, settings)
    train = dataclasses.replace(config.train, save=None, save_interval=None, finetune=config.train.load is not None)
    if settings.source != "copy":
        train = dataclasses.replace(train, load=settings.checkpoint, finetune=settings.checkpoint is not None)
    return dataclasses.replace(found, train=train, models=ModelsConfig())


def check_tokenizer(config: RunConfig, second: RunConfig, tokenizer: Any) -> None:
    """Compare the tokenizer of the second model with the run's; without one of them, the sizes of the vocabularies.

    Args:
        config: of the run.
        second: from `reference_config`.
        tokenizer: the run's, or None.

    Raises:
        ConfigError: they differ.
    """
    settings = config.models.second
    if settings is None or settings.source == "copy":
        return
    folder = _tokenizer_folder(settings)
    if tokenizer is not None and folder is not None:
        from megatron_wrap.data.tokenizer import load_tokenizer

        ours, theirs = tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()
        if ours != theirs:
            token = next(token for token in sorted(ours.keys() | theirs.keys()) if ours.get(token) != theirs.get(token))
            raise ConfigError(
                f"{config.models.path}: {settings.source} {getattr(settings, settings.source)} has another tokenizer "
                f"than the run: token {token!r} has the id {theirs.get(token)} there and {ours.get(token)} here; use a "
                f"{config.models.role} with the run's tokenizer"
            )
        return
    size, own = config.arch.vocab_size or (len(tokenizer) if tokenizer is not None else None), second.arch.vocab_size
    if size is not None and own is not None and size != own:
        raise ConfigError(
            f"{config.models.path}: {settings.source} {getattr(settings, settings.source)} has a vocabulary of {own} "
            f"entries and the run one of {size}; use a {config.models.role} with the run's tokenizer"
        )


def add_second_model(state: TrainingState, second: RunConfig, tokenizer: Any) -> None:
    """Build the second model of a run; `RunCheckpoints.restore` loads the weights that are not in a Hugging Face
    folder.

    Args:
        state: of the run; gets the model.
        second: from `reference_config`.
        tokenizer: the run's, or None.

    Raises:
        ConfigError: its tokenizer is not the run's.
    """
    from megatron_wrap.engine.build_reference import build_reference

    config = state.config
    check_tokenizer(config, second, tokenizer)
    second = dataclasses.replace(second, optimizer=config.optimizer, ddp=config.ddp)
    state.reference = build_reference(second, state.platform, state.parallel, tokenizer, state.shape.vocab_size)


def _with_source(config: RunConfig, settings: SecondModelConfig) -> RunConfig:
    if settings.source == "copy":
        return config
    try:
        if settings.hf_path is not None:
            found = _of_hugging_face(config, settings.hf_path)
        else:
            found = _of_checkpoint(config, str(settings.checkpoint))
        check_values(found)
        check_hugging_face(found)
    except MegatronWrapError as error:
        raise type(error)(f"{config.models.path}: {str(error).removeprefix(f'{HF_PATH}: ')}") from error
    if derived.virtual_pipeline_size(found) != derived.virtual_pipeline_size(config):
        raise LayoutError(
            f"{config.models.path}: the model has {found.arch.num_layers} layers, which is another number of virtual "
            f"pipeline stages than the policy's with {config.arch.num_layers}; set "
            "num_layers_per_virtual_pipeline_stage to null"
        )
    if settings.update_interval is not None:
        _refuse_another_architecture(config, found)
    return found


def _of_hugging_face(config: RunConfig, hf_path: str) -> RunConfig:
    provider = dataclasses.replace(config.model_provider, hf_path=hf_path)
    chosen = {"model_provider": {"__override__": {"hf_path": hf_path}}}
    arch = _arch(config, {}, {**chosen, "data": {"__select__": "none"}})
    return dataclasses.replace(config, arch=arch, model_provider=provider)


def _of_checkpoint(config: RunConfig, folder: str) -> RunConfig:
    found = find_checkpoint(folder)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {folder}; set checkpoint to a folder with checkpoints")
    provider = dataclasses.replace(config.model_provider, hf_path=None)
    if not (found / RESOLVED).is_file():  # of Megatron-LM
        return dataclasses.replace(config, model_provider=provider)
    saved = load_resolved(found / RESOLVED)
    values = dict(_section(saved, SECTION_PATHS["arch"]))
    values["vocab_size"] = read_facts(found).get("vocab_size", values["vocab_size"])
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = _section(saved, SECTION_PATHS["train"])["seq_length"]
    arch = _arch(config, {"arch": {"__select__": "language-model-base", "__override__": values}}, {})
    return dataclasses.replace(config, arch=arch, model_provider=provider)


def _arch(config: RunConfig, model: Mapping[str, Any], wrap: Mapping[str, Any]) -> ArchConfig:
    """The architecture that a run with these sections has, with the keys that are the run's own choice."""
    common = {"micro_batch_size": 1, "global_batch_size": 1, "seq_length": config.train.seq_length, "train_iters": 1}
    content = {
        "megatron_lm": {"model": model, "train": {"common": common, "learning-rate": {"lr": 0.0}}},
        "megatron_wrap": {**wrap, "flow": {"__select__": "minimal_mock"}},
    }
    with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as folder:
        path = Path(folder, "reference.yaml")
        path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
        arch = read_run(path).arch
    return dataclasses.replace(arch, **{name: getattr(config.arch, name) for name in _OF_THE_RUN})


def _section(values: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for name in path.split("."):
        values = values[name]
    return values


def _refuse_another_architecture(config: RunConfig, second: RunConfig) -> None:
    length = config.train.seq_length
    ours, theirs = complete(config.arch, length), complete(second.arch, length)
    learned = ours.position_embedding_type == "learned_absolute"
    skipped = {*_OF_THE_RUN, "upstream", "group_query_attention", "vocab_size"}
    skipped |= set() if learned else {"max_position_embeddings"}
    for field in dataclasses.fields(ours):
        before, now = getattr(theirs, field.name), getattr(ours, field.name)
        if field.name not in skipped and before != now:
            raise ConfigError(
                f"{config.models.path}: refresh_interval and ema_decay need a {config.models.role} of the policy's "
                f"architecture, but {field.name} is {before} there and {now} here; delete them, or use such a reference"
            )


def _tokenizer_folder(settings: SecondModelConfig) -> str | None:
    """The folder of the second model's tokenizer; None if it is not known."""
    if settings.hf_path is not None:
        found = read_hugging_face_config(settings.hf_path)
        return str(found.folder) if found.has_tokenizer else None
    checkpoint = find_checkpoint(str(settings.checkpoint))
    if checkpoint is None or not (checkpoint / RESOLVED).is_file():
        return None
    tokenizer = _section(load_resolved(checkpoint / RESOLVED), SECTION_PATHS["data"]).get("tokenizer")
    return tokenizer if isinstance(tokenizer, str) and Path(tokenizer).expanduser().is_dir() else None
