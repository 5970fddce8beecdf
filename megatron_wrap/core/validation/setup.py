"""Validation of flow, tokenizer, vocabulary and Megatron-Core's configuration of the model, without process groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.vocabulary import grown_vocabulary, model_vocab_size, small_tokenizer
from megatron_wrap.config.schema import derived
from megatron_wrap.core.validation.candidate import Candidate, Note
from megatron_wrap.metrics.number_format import counted


def check_tokenizer(candidate: Candidate) -> Iterator[Note]:
    """Load the tokenizer, and compare its vocabulary with those of the model, the checkpoint and indexed files.

    Raises:
        DataError: the tokenizer cannot be loaded, or does not fit indexed files or a prompt. ConfigError: it has more
            entries than the model. CheckpointError: the checkpoint has another vocabulary.
    """
    from megatron_wrap.checkpoint.precheck import check_saved_vocabulary, starting_checkpoint
    from megatron_wrap.data.chat.prompts import prompt_token_ids
    from megatron_wrap.data.chat.tokenizer import run_tokenizer
    from megatron_wrap.data.indexed.windows import check_tokens
    from megatron_wrap.model.vocabulary_padding import padded_vocab_size

    config = candidate.config
    candidate.tokenizer = run_tokenizer(config.data)
    if warning := small_tokenizer(config.arch, candidate.tokenizer):
        yield Note(warning, is_warning=True)
    candidate.vocab_size = size = model_vocab_size(config.arch, candidate.tokenizer, config.model_provider.hf_path)
    if warning := grown_vocabulary(config, size):
        yield Note(warning, is_warning=True)
    start = starting_checkpoint(config)
    if start is not None:
        check_saved_vocabulary(start.path, size)
    if derived.is_indexed(config.data) and not candidate.unreadable:
        check_tokens(config, candidate.tokenizer)
    for prompt in config.train.sample_prompts or ():
        prompt_token_ids(candidate.tokenizer, prompt, size)
    tensor = config.parallel.tensor_model_parallel_size
    padded = padded_vocab_size(size, config.arch.make_vocab_size_divisible_by, tensor)
    entries = "no tokenizer" if candidate.tokenizer is None else counted(len(candidate.tokenizer), "entry")
    yield Note(f"{entries}; the model's vocabulary is {size:,}, padded to {padded:,}")


def check_platform(candidate: Candidate) -> Iterator[Note]:
    """Let Megatron-Core validate the configuration of the model on this machine's platform.

    Raises:
        PlatformError: the platform lacks what the configuration requires, or Megatron-Core rejects it. ConfigError: an
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
