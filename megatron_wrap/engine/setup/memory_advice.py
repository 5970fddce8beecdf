"""Lists configuration changes for a step that does not fit into a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.engine.setup.linear_cross_entropy import KEY, avoidable_logits_bytes
from megatron_wrap.engine.state.state import TrainingState


@contextmanager
def memory_advised(state: TrainingState) -> Iterator[None]:
    """Context that adds to a torch.OutOfMemoryError a list of changes, cheapest first."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{error}\n{memory_advice(state)}") from error


def memory_advice(state: TrainingState) -> str:
    """Lines about keys that lower the memory of a step, cheapest first, with the saving or cost of each."""
    config, parallel, tokens = state.config, state.parallel, state.config.train.max_tokens_per_micro_batch
    paths, lines = SECTION_PATHS, []
    size = avoidable_logits_bytes(state) / 2**30
    if size:
        lines.append(f"{KEY}: true (the logits of a micro-batch and their gradient, {size:.3g} GiB, are not stored)")
    if parallel.dp.size > 1 and not config.optimizer.use_distributed_optimizer:
        lines.append(f"{paths['optimizer']}.use_distributed_optimizer: true (replicas share the optimizer's state)")
    if tokens is not None:
        lines.append(f"{paths['train']}.max_tokens_per_micro_batch: less than {tokens} (smaller products)")
    elif config.train.micro_batch_size > 1:
        count = config.train.micro_batch_size
        lines.append(f"{paths['train']}.micro_batch_size: less than {count} (the same steps, smaller products)")
    if config.recompute.recompute_granularity != "full":
        lines.append(f"{paths['recompute']}.__select__: full (the backward pass computes activations again)")
    lines.append("more tensor, pipeline or context parallelism, or a shorter seq_length")
    return "to use less memory, the cheapest first:\n" + "\n".join(f"  {line}" for line in lines)
