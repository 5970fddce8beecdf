"""The configuration of the reference or teacher model of `megatron_wrap.models`: the run's, with its own architecture.

Needs neither torch nor Megatron-Core, and is validated before any process starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.adapters.peft_folder import with_other_adapter
from megatron_wrap.bridge.export.export_format import with_derived_sizes
from megatron_wrap.bridge.loading.hf_path import check_hugging_face
from megatron_wrap.bridge.loading.hub import read_run_content
from megatron_wrap.checkpoint.saved_run import existing_checkpoint, find_checkpoint, read_saved_run
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.hugging_face import HF_PATH, TRAINING_KEYS, read_hugging_face_config
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import AdapterConfig, ArchConfig
from megatron_wrap.config.schema.reference_models import ReferenceModelConfig
from megatron_wrap.config.schema.run import ModelsConfig, RunConfig
from megatron_wrap.errors import ConfigError, LayoutError, MegatronWrapError
from megatron_wrap.metrics.number_format import counted

if TYPE_CHECKING:
    from megatron_wrap.engine.state.state import TrainingState

_OF_THE_RUN = (
    *("make_vocab_size_divisible_by", "transformer_impl", "attention_softmax_in_fp32", "experts_impl"),
    *("moe_grouped_gemm", "moe_token_dispatcher_type", *sorted(TRAINING_KEYS)),
)
"""Keys of the architecture that select kernels and training, not the model: all models of a run have the same
values."""


_OF_POLICY = ("copy", "base", "adapter")
"""Sources with which the reference model is the policy's model."""


def reference_config(config: RunConfig) -> RunConfig | None:
    """The run's configuration with the architecture of the reference or teacher model; None if training needs none.

    Raises:
        ConfigError, LayoutError: the model does not fit the run's layout, or cannot follow the policy.
        CheckpointError: a folder is missing, or its weights are incomplete.
    """
    settings = config.models.reference_or_teacher
    if settings is None or settings.precomputed is not None:
        return None
    return _of_source(config, settings)


def precompute_config(config: RunConfig) -> RunConfig:
    """The configuration of a run for forward passes, whose only model is the reference or teacher model of `config`,
    with its weights. With `copy`, or without such a model, it is the policy before its first step.

    Raises:
        MegatronWrapError: as `reference_config`.
    """
    settings = config.models.reference_or_teacher or ReferenceModelConfig(copy=True)
    train = dataclasses.replace(config.train, save=None, save_interval=None, finetune=config.train.load is not None)
    if settings.source not in _OF_POLICY:
        train = dataclasses.replace(train, load=settings.checkpoint, finetune=settings.checkpoint is not None)
    source = _of_source(config, settings)
    if settings.adapter is not None:
        source = with_other_adapter(config, settings.adapter)
    return dataclasses.replace(source, train=train, models=ModelsConfig())


def add_reference_model(state: TrainingState, reference: RunConfig, tokenizer: Any) -> None:
    """Build the reference or teacher model of a run; `RunCheckpoints.restore` loads the weights that are not in a
    Hugging Face folder.

    Args:
        state: of the run; receives the model.
        reference: from `reference_config`.
        tokenizer: the run's, or None.

    Raises:
        ConfigError: its tokenizer is not the run's; or it is to follow the policy, and has another number of rows.
    """
    from megatron_wrap.setup.reference_model import base_of_policy, build_reference

    config = state.config
    check_tokenizer(config, reference, tokenizer)
    reference = dataclasses.replace(reference, optimizer=config.optimizer, ddp=config.ddp)
    settings = config.models.reference_or_teacher
    if settings is not None and settings.is_policy:
        state.reference = base_of_policy(state)
        return
    state.reference = build_reference(reference, state.platform, state.parallel, tokenizer)
    if state.reference.settings.update_interval is not None and state.reference.vocab_size != state.shape.vocab_size:
        raise ConfigError(
            f"{config.models.path}: refresh_interval and ema_decay need a {config.models.role} of the policy's "
            f"architecture, but its vocabulary has {state.reference.vocab_size} entries and the policy's "
            f"{state.shape.vocab_size}; delete them, or use such a reference"
        )


def check_tokenizer(config: RunConfig, reference: RunConfig, tokenizer: Any) -> None:
    """Compare the reference or teacher model's tokenizer with the run's; if one of them is not known, the sizes of the
    vocabularies.

    Args:
        config: of the run.
        reference: of the other model.
        tokenizer: the run's, or None.

    Raises:
        ConfigError: they differ.
    """
    settings = config.models.reference_or_teacher
    if settings is None or settings.source in _OF_POLICY:
        return
    model = f"{config.models.path}: {settings.source} {getattr(settings, settings.source)}"
    folder = _tokenizer_folder(settings)
    if tokenizer is not None and folder is not None:
        from megatron_wrap.data.chat.tokenizer import load_tokenizer

        ids, other_ids = tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()
        if ids != other_ids:
            tokens = sorted(ids.keys() | other_ids.keys())
            token = next(token for token in tokens if ids.get(token) != other_ids.get(token))
            raise ConfigError(
                f"{model} has another tokenizer than the run: token {token!r} has the id {other_ids.get(token)} there "
                f"and {ids.get(token)} here; use a {config.models.role} with the run's tokenizer"
            )
        return
    vocab_size = model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path)
    if reference.arch.vocab_size not in (None, vocab_size):
        raise ConfigError(
            f"{model} has a vocabulary of {reference.arch.vocab_size} entries and the run one of {vocab_size}; use a "
            f"{config.models.role} with the run's tokenizer"
        )


def _of_source(config: RunConfig, settings: ReferenceModelConfig) -> RunConfig:
    if settings.source in _OF_POLICY:
        return config
    run = config
    config = dataclasses.replace(config, adapter=AdapterConfig())
    try:
        if settings.hf_path is not None:
            reference = _of_hugging_face(config, settings.hf_path)
        else:
            reference = _of_checkpoint(config, str(settings.checkpoint))
        check_values(reference)
        check_hugging_face(reference)
    except MegatronWrapError as error:
        raise type(error)(f"{config.models.path}: {str(error).removeprefix(f'{HF_PATH}: ')}") from error
    if derived.virtual_pipeline_size(reference) != derived.virtual_pipeline_size(config):
        raise LayoutError(
            f"{config.models.path}: the model has {counted(reference.arch.num_layers, 'layer')}, which is another "
            f"number of virtual pipeline stages than the policy's with {config.arch.num_layers}; set "
            "num_layers_per_virtual_pipeline_stage to null"
        )
    if settings.update_interval is not None:
        _refuse_another_architecture(config, reference)
    return dataclasses.replace(reference, policy=run)


def _of_hugging_face(config: RunConfig, hf_path: str) -> RunConfig:
    provider = dataclasses.replace(config.model_provider, hf_path=hf_path)
    selection = {"model_provider": {"__override__": {"hf_path": hf_path}}, "data": {"__select__": "none"}}
    return dataclasses.replace(config, arch=_arch(config, {}, selection), model_provider=provider)


def _of_checkpoint(config: RunConfig, folder: str) -> RunConfig:
    checkpoint = existing_checkpoint(folder)
    config = dataclasses.replace(config, model_provider=dataclasses.replace(config.model_provider, hf_path=None))
    saved = read_saved_run(checkpoint)
    if saved is None:  # of Megatron-LM
        return config
    return dataclasses.replace(config, arch=_arch(config, {"arch": saved.arch_selection()}, {}))


def _arch(config: RunConfig, model: Mapping[str, Any], wrap: Mapping[str, Any]) -> ArchConfig:
    """The architecture of a run with these sections, and with the values of the keys that all models of a run share."""
    common = {"micro_batch_size": 1, "global_batch_size": 1, "seq_length": config.train.seq_length, "train_iters": 1}
    content = {
        "megatron_lm": {"model": model, "train": {"common": common, "learning-rate": {"lr": 0.0}}},
        "megatron_wrap": {**wrap, "flow": {"__select__": "minimal_mock"}},
    }
    arch = read_run_content(content).arch
    return dataclasses.replace(arch, **{name: getattr(config.arch, name) for name in _OF_THE_RUN})


def _refuse_another_architecture(config: RunConfig, reference: RunConfig) -> None:
    length = config.train.seq_length
    arch, other_arch = with_derived_sizes(config.arch, length), with_derived_sizes(reference.arch, length)
    learned = arch.position_embedding_type == "learned_absolute"
    skipped = {*_OF_THE_RUN, "upstream", "group_query_attention", "vocab_size"}
    skipped |= set() if learned else {"max_position_embeddings"}
    for field in dataclasses.fields(arch):
        before, now = getattr(other_arch, field.name), getattr(arch, field.name)
        if field.name not in skipped and before != now:
            raise ConfigError(
                f"{config.models.path}: refresh_interval and ema_decay need a {config.models.role} of the policy's "
                f"architecture, but {field.name} is {before} there and {now} here; delete them, or use such a reference"
            )


def _tokenizer_folder(settings: ReferenceModelConfig) -> str | None:
    """The folder of the model's tokenizer; None if it is not known."""
    if settings.hf_path is not None:
        hugging_face = read_hugging_face_config(settings.hf_path)
        return str(hugging_face.folder) if hugging_face.has_tokenizer else None
    checkpoint = find_checkpoint(str(settings.checkpoint))
    saved = None if checkpoint is None else read_saved_run(checkpoint)
    tokenizer = None if saved is None else saved.section("data").get("tokenizer")
    return tokenizer if isinstance(tokenizer, str) and Path(tokenizer).expanduser().is_dir() else None
