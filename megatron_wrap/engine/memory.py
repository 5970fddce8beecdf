"""Memory of a step: whether the logits of a micro-batch are stored, and configuration changes for a step that does not
fit into a GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import ConfigError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.request import padded_vocab_size
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base.platform import Platform
from megatron_wrap.utils.dist_logger import logger

MEMORY_SHARE = 0.02
"""Share of the device's memory above which `auto` does not store the logits of a micro-batch. Below it the saved
memory, twice the logits with their gradient, is not worth a loss in chunks."""
KEY = f"{SECTION_PATHS['model_provider']}.linear_cross_entropy"


def defers_logits(
    config: RunConfig, platform: Platform, parallel: ParallelState, vocab_size: int, trained: bool = True
) -> bool:
    """Whether the model's output is deferred logits. For the trained model, logs the choice of `auto` if there is one.

    Raises:
        ConfigError: linear_cross_entropy is true for a trained model without a plain output layer.
    """
    wanted = config.model_provider.linear_cross_entropy
    reason = obstacle(config)
    if reason is not None:
        if wanted is True and trained:
            raise ConfigError(f"{config.located(KEY)}: true, but {reason}; write auto or false")
        return False
    if wanted != "auto":
        return bool(wanted)
    size = logits_bytes(config, parallel, vocab_size)
    total = platform.total_memory_bytes()
    chosen = size > MEMORY_SHARE * total
    if chosen and trained:
        logger.info_rank_0(
            f"linear_cross_entropy: auto computes the loss without storing the logits: those of a micro-batch are "
            f"{size / 2**30:.3g} GiB, {100 * size / total:.2g}% of the device's memory"
        )
    return chosen


def avoidable_logits_bytes(
    config: RunConfig, parallel: ParallelState, chunks: Sequence[torch.nn.Module], vocab_size: int
) -> int:
    """Memory of the logits of a full micro-batch and of their gradient on this process, which linear_cross_entropy
    would save; 0: they are not stored here, or the model needs them.

    Args:
        chunks: this process's model chunks, in Megatron-Core's wrappers.
        vocab_size: of the model, without padding.
    """
    from megatron_wrap.model.gpt_model import BatchFirstGPTModel

    last = bare_model(chunks[-1])
    is_stored = not (isinstance(last, BatchFirstGPTModel) and last.defers_logits)
    if not (parallel.is_last_stage and is_stored) or obstacle(config) is not None:
        return 0
    return 2 * logits_bytes(config, parallel, vocab_size)


def logits_bytes(config: RunConfig, parallel: ParallelState, vocab_size: int) -> int:
    """Size of the logits of a full micro-batch on one process, in the model's type."""
    train = config.train
    tokens = train.max_tokens_per_micro_batch or train.micro_batch_size * train.seq_length
    padded = padded_vocab_size(vocab_size, config.arch.make_vocab_size_divisible_by, parallel.tp.size)
    itemsize = 2 if config.dtype.bf16 or config.dtype.fp16 else 4
    return tokens // parallel.cp.size * (padded // parallel.tp.size) * itemsize


def obstacle(config: RunConfig) -> str | None:
    """The reason why the logits of this run's model cannot be deferred; None if they can."""
    if config.model_provider.provider_key != "gpt_model":
        return f"the provider {config.model_provider.provider_key} builds its own output layer"
    if config.adapter.adapter_type != "none" and config.adapter.trainable_token_indices:
        return "trainable_token_indices replaces columns of the logits"
    return None


def memory_advice(
    config: RunConfig, parallel: ParallelState, chunks: Sequence[torch.nn.Module], vocab_size: int
) -> str:
    """Lines about keys that lower the memory of a step, cheapest first, with the saving or cost of each; arguments of
    `avoidable_logits_bytes`."""
    tokens, paths, lines = config.train.max_tokens_per_micro_batch, SECTION_PATHS, []
    size = avoidable_logits_bytes(config, parallel, chunks, vocab_size) / 2**30
    if size:
        lines.append(f"{KEY}: true (the logits of a micro-batch and their gradient, {size:.3g} GiB, are not stored)")
    if parallel.dp.size > 1 and not config.optimizer.use_distributed_optimizer:
        lines.append(f"{paths['optimizer']}.use_distributed_optimizer: true (replicas share the optimizer's state)")
    if tokens is not None:
        lines.append(f"{paths['train']}.max_tokens_per_micro_batch: less than {tokens} (smaller matmuls)")
    elif config.train.micro_batch_size > 1:
        count = config.train.micro_batch_size
        lines.append(f"{paths['train']}.micro_batch_size: less than {count} (the same steps, smaller matmuls)")
    if config.recompute.recompute_granularity != "full":
        lines.append(f"{paths['recompute']}.__select__: full (the backward pass computes activations again)")
    lines.append("more tensor, pipeline or context parallelism, or a shorter seq_length")
    return "to use less memory, the cheapest first:\n" + "\n".join(f"  {line}" for line in lines)
