"""Adds up the gradients of parameters that the first and the last pipeline stage both have, at the end of a step's
backward pass. Megatron-Core does so for tied embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_wrap.model.chunks import bare_model
from megatron_wrap.parallel.collectives import reduce_in_place


def with_tied_gradients(finalize: Callable[..., Any], chunks: Sequence[torch.nn.Module]) -> Callable[..., Any]:
    """The function that completes the gradients of a step: Megatron-Core's, followed by the sum over both stages of the
    gradients of parameters that both stages have."""
    from megatron.core import parallel_state

    copied = list(_copied(chunks))
    if not copied:
        return finalize
    group = parallel_state.get_embedding_group()

    def finalized(*arguments: Any, **named: Any) -> Any:
        result = finalize(*arguments, **named)
        for parameter in copied:
            reduce_in_place(parameter.main_grad, "sum", group)
        return result

    return finalized


def _copied(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Parameters that the first and the last stage both have: trained rows of tied embeddings, and embeddings that
    layers for multi-token prediction use."""
    from megatron_wrap.model.gpt_model import BatchFirstGPTModel
    from megatron_wrap.nn.adapters.embedding_rows import ROWS, embedding_rows_of

    models = [*map(bare_model, chunks)]
    yield from (rows.get_parameter(ROWS) for rows in embedding_rows_of(models) if rows.tied_over_stages)
    for model in models:
        weight = model.copied_embedding if isinstance(model, BatchFirstGPTModel) else None
        if weight is not None and weight.requires_grad:
            yield weight
