"""Validation of flow, tokenizer, vocabulary and Megatron-Core's configuration of the model, without process groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.contradictions import refuse
from megatron_wrap.config.checks.vocabulary import model_vocab_size, small_tokenizer
from megatron_wrap.config.schema import derived
from megatron_wrap.core.validation.candidate import Candidate, Note
from megatron_wrap.metrics.number_format import counted

if TYPE_CHECKING:
    from megatron_wrap.data.chat.tokenizer import NewTokens


def check_tokenizer(candidate: Candidate) -> Iterator[Note]:
    """Load the tokenizer, and compare its vocabulary with those of the model, the checkpoint and indexed files.

    Raises:
        DataError: the tokenizer cannot be loaded, or does not fit indexed files or a prompt, or indexed files have ids
            outside the vocabulary. ConfigError: it has more
            entries than the model. CheckpointError: the checkpoint has another vocabulary.
    """
    from megatron_wrap.checkpoint.saved_run import (
        check_saved_vocabulary,
        read_saved_run,
        refuse_new_tokens,
        starting_checkpoint,
        tokens_new_to_checkpoint,
    )
    from megatron_wrap.data.chat.encode import prompt_token_ids
    from megatron_wrap.data.chat.tokenizer import run_tokenizer
    from megatron_wrap.data.indexed.windows import check_first_tokens, check_tokens
    from megatron_wrap.model.request import padded_vocab_size

    config = candidate.config
    candidate.tokenizer = run_tokenizer(config.data)
    if warning := small_tokenizer(config.arch, candidate.tokenizer):
        yield Note(warning, is_warning=True)
    candidate.vocab_size = size = model_vocab_size(config.arch, candidate.tokenizer, config.model_provider.hf_path)
    start = starting_checkpoint(config)
    if start is not None:
        check_saved_vocabulary(start.path, size)
        if start.resumes or not config.train.finetune:
            refuse_new_tokens(start.path, tokens_new_to_checkpoint(read_saved_run(start.path), config, size))
    if warning := new_tokens_warning(config, candidate.tokenizer, size):
        if config.model_provider.verify_hf:
            refuse(config, ["model_provider.verify_hf"], f"{warning}; write false")
        yield Note(warning, is_warning=True)
    if derived.is_indexed(config.data) and not candidate.unreadable:
        check_tokens(config, candidate.tokenizer)
        check_first_tokens(config, size)
    for prompt in config.train.sample_prompts or ():
        prompt_token_ids(candidate.tokenizer, prompt, size)
    tensor = config.parallel.tensor_model_parallel_size
    padded = padded_vocab_size(size, config.arch.make_vocab_size_divisible_by, tensor)
    entries = "no tokenizer" if candidate.tokenizer is None else counted(len(candidate.tokenizer), "entry")
    yield Note(f"{entries}; the model's vocabulary is {size:,}, padded to {padded:,}")


def new_tokens_warning(config: RunConfig, tokenizer: Any, vocab_size: int) -> str | None:
    """A warning if the weights that the run starts from were not trained with some of its tokens: the rows of these
    tokens begin as the mean of the other rows. It also reports whether they stay frozen. Reads files only."""
    from megatron_wrap.bridge.loading.hf_path import folder_arch, tokens_new_to_folder
    from megatron_wrap.checkpoint.saved_run import read_saved_run, starting_checkpoint, tokens_new_to_checkpoint

    start, added = starting_checkpoint(config), 0
    if start is not None:
        weights, tokens = str(start.path), tokens_new_to_checkpoint(read_saved_run(start.path), config, vocab_size)
    else:
        weights, tokens = "model_provider.hf_path", tokens_new_to_folder(config, tokenizer, vocab_size)
        added = 0 if tokens is None else vocab_size - (folder_arch(config).vocab_size or vocab_size)
    if tokens is None:
        return None
    grows = f", of which {added:,} are added," if added > 0 else ""
    text = (
        f"the model of {weights} was not trained with {counted(len(tokens.ids), 'token')} of the tokenizer "
        f"({tokens.listed}): the rows in embedding and output layer{grows} begin as the mean of the others"
    )
    frozen = _frozen_rows(config, tokens, vocab_size)
    if not frozen:
        return text
    if config.adapter.adapter_type == "none":
        return (
            f"{text}; those of {' and '.join(frozen)} stay frozen by megatron_lm.train.common.freeze: remove it there"
        )
    return (
        f"{text}; those of {' and '.join(frozen)} stay frozen, and an exported adapter does not contain them: train "
        f"them by megatron_wrap.adapter.modules_to_save: [{', '.join(frozen)}], or these rows alone by "
        "trainable_token_indices"
    )


def _frozen_rows(config: RunConfig, tokens: NewTokens, vocab_size: int) -> list[str]:
    """Hugging Face's names of the vocabulary layers whose rows of new tokens would not be trained."""
    from megatron_wrap.bridge.adapters.run_adapter import run_adapter
    from megatron_wrap.bridge.adapters.trained_parameters import frozen_names, hugging_face_names
    from megatron_wrap.bridge.export.export_format import export_format

    named = hugging_face_names(config)
    if named is None:
        return []
    table, adapter = export_format(config, vocab_size).parameters, run_adapter(config, vocab_size)
    if adapter is not None:
        rows = (name for name, indices in adapter.rows.items() if {*tokens.ids} <= {*indices})
        frozen = table.keys() - {*adapter.saved, *rows}
    else:
        frozen = frozen_names(config, named) if config.train.freeze else set()
    tensors = [named[name][0] for name, mapping in table.items() if mapping.padded and name in frozen]
    return [tensor.split(".")[-2] for tensor in tensors]


def check_platform(candidate: Candidate) -> Iterator[Note]:
    """Let Megatron-Core validate the configuration of the model on this machine's platform.

    Raises:
        PlatformError: the platform does not support the configuration, or Megatron-Core rejects it. ConfigError: an
            unknown model provider or metric logger.
    """
    from megatron_wrap.model.provider import MegatronModelProviderEntry
    from megatron_wrap.model.transformer_config import transformer_config, use_transformer_engine
    from megatron_wrap.plan.model_parts import model_shape
    from megatron_wrap.plan.pipeline_split import with_split
    from megatron_wrap.platform import choose_platform
    from megatron_wrap.platform.base.machine import visible_gpus
    from megatron_wrap.utils.metric_loggers import MetricLoggerEntry

    config = candidate.config
    for key in config.logger.metric_loggers:
        MetricLoggerEntry.resolve(key)
    if candidate.runs_elsewhere and config.init.platform != "cpu" and not visible_gpus():
        yield Note("checked when the run starts: this machine has no GPU, and its processes run elsewhere")
        return
    platform = choose_platform(config.init.platform)
    platform.install()
    try:
        provider = config.model_provider.provider_key
        MegatronModelProviderEntry.get_provider(provider)
        shape = model_shape(config, candidate.vocab_size)
        transformer_config(with_split(config, shape, platform.machine.device), platform)
        platform.refuse_unsafe(derived.optimizer_settings(config.optimizer), platform.has_transformer_engine)
        layers = "Transformer Engine" if use_transformer_engine(config, platform) else "torch"
    finally:
        platform.uninstall()
    yield Note(f"{provider} on platform {platform.name}, layers of {layers}")


def check_flow(config: RunConfig) -> str:
    """Import the flow's module, and validate its class, and its keys against the class's `Config`; returns the name of
    the class.

    Raises:
        ConfigError: an unknown flow, or unknown keys. FlowError: the flow is incomplete.
    """
    from megatron_wrap.flow.contract.config import decode_flow_config
    from megatron_wrap.flow.entry import MegatronWrapFlowEntry

    if "" not in sys.path:  # for my_module:MyFlow in the working directory, where the processes find it
        sys.path.insert(0, "")
    flow_class = MegatronWrapFlowEntry.get_flow_class(config.flow.flow_key)
    decode_flow_config(flow_class, config)
    return flow_class.__name__
