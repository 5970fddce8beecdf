"""Megatron-Core's forward(-backward) schedule over a replica's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.micro_batch import PADDING_MASK, MicroBatch, localize, padded_width
from megatron_wrap.engine.state import TrainingState


def localize_all(state: TrainingState, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches on this device, padded, this context-parallel rank's part of them; within a pipeline all padded
    to one length, so that its stages need not tell each other shapes, which would wait for the device in each
    micro-batch."""
    lengths = [micro_batch.width + state.extra_padding for micro_batch in micro_batches]
    if state.parallel.pp.size > 1:
        lengths = [max(lengths)] * len(lengths)
    sequence_parallel = state.transformer_config.sequence_parallel
    has_experts = state.config.arch.num_experts is not None
    widths = [padded_width(length, state.parallel, sequence_parallel) for length in lengths]
    return [
        localize(micro_batch, state.flow, width, state.parallel, state.platform.device, with_padding_mask=has_experts)
        for micro_batch, width in zip(micro_batches, widths, strict=True)
    ]


def run_schedule(
    chunks: list[Any],
    state: TrainingState,
    local: list[MicroBatch],
    loss_function: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
    forward_only: bool,
) -> list[Any]:
    """The schedule of a model's chunks over micro-batches of `localize_all`, which have as many sequences each.

    Args:
        chunks: this process's part of the model: `state.chunks`, or those of a reference model.

    Returns:
        What `loss_function` gave to store for each micro-batch, on the last pipeline stage; else an empty list.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    # half-precision logits stay as they are: the operations of a loss compute in fp32 inside, and a copy of all logits
    # in fp32 would be the largest tensor of the step (Megatron-Core's Float16Module makes one unless told otherwise)
    half = state.config.dtype.bf16 or state.config.dtype.fp16
    options = {"fp32_output": False} if half else {}

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(iterator)
        inputs = micro_batch.model_inputs
        if model is not chunks[0] or state.parallel.pp.rank > 0:
            inputs = _later_stage_inputs(state, inputs)
        return model(**inputs, **options), partial(loss_function, micro_batch)

    # one iterator for each model chunk: an interleaved schedule runs the chunks out of step
    iterators = [iter(local) for _ in chunks]
    interleaved = len(chunks) > 1
    width = max(micro_batch.padded_width for micro_batch in local)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if interleaved else iterators[0],
        model=chunks if interleaved else chunks[0],
        num_microbatches=len(local),
        seq_length=width,
        micro_batch_size=local[0].num_sequences,
        decoder_seq_length=width,
        forward_only=forward_only,
    )


def _later_stage_inputs(state: TrainingState, inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Under sequence parallelism the first stage splits the padding mask as it does the embeddings, and no other does
    (models/gpt/gpt_model.py, _preprocess)."""
    mask, tp = inputs.get(PADDING_MASK), state.parallel.tp
    if mask is None or not state.transformer_config.sequence_parallel:
        return inputs
    return {**inputs, PADDING_MASK: mask.chunk(tp.size, dim=1)[tp.rank]}
