"""This process's part of a micro-batch: pad and take the context-parallel shard; copy to the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.micro_batch import MicroBatch
from megatron_wrap.engine.packed import filled_row
from megatron_wrap.flow.base import SEQUENCE_LENGTHS
from megatron_wrap.parallel import context
from megatron_wrap.parallel.state import Axis, ParallelState

PADDING_MASK = "padding_mask"
"""Input of an MoE model: bool [B, S], True on padding, which the routers exclude from their losses."""
PACKED = "packed_seq_params"
"""Input of the model for a packed micro-batch: the boundaries of its sequences, a `PackedSequences`."""


def padded_width(length: int, parallel: ParallelState, sequence_parallel: bool, token_multiple: int = 1) -> int:
    """A sequence length in tokens, rounded up to a multiple of the layout's divisor.

    Args:
        token_multiple: must divide the tokens of each context-parallel rank.
    """
    divisor = context.sequence_divisor(parallel.tp.size, parallel.cp.size, sequence_parallel, token_multiple)
    return -(-length // divisor) * divisor


def shard(micro_batch: MicroBatch, width: int, cp: Axis, with_padding_mask: bool = False) -> MicroBatch:
    """Pad to `width` and take this context-parallel rank's shard, on the CPU.

    A packed row is split sequence by sequence; the model's inputs then contain PACKED, the loss inputs
    SEQUENCE_LENGTHS.

    Args:
        width: in tokens over all context-parallel ranks, a multiple of the layout's divisor.
        with_padding_mask: add PADDING_MASK to the model's inputs.
    """
    seqdims, pad_values = micro_batch.seqdims, micro_batch.pad_values
    segments = filled_row(micro_batch.segments, width) if micro_batch.segments else (width,)
    places = context.packed_positions(segments, cp.size, cp.rank)

    def local(name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or name not in seqdims:
            return tensor
        tensor = context.pad_to(tensor, seqdims[name], width, pad_values.get(name, 0))
        return tensor if cp.size == 1 else tensor.index_select(seqdims[name], places)

    model_inputs: dict[str, Any] = {name: local(name, tensor) for name, tensor in micro_batch.model_inputs.items()}
    loss_inputs: dict[str, Any] = {name: local(name, tensor) for name, tensor in micro_batch.loss_inputs.items()}
    if with_padding_mask:
        model_inputs[PADDING_MASK] = _padding_mask(micro_batch, segments, width)[:, places]
    if micro_batch.segments:
        from megatron_wrap.ops.packed import PackedSequences

        model_inputs[PACKED] = PackedSequences.of(segments, cp.size, cp.rank)
        with_rest = [*micro_batch.segments, width - sum(micro_batch.segments)]
        loss_inputs[SEQUENCE_LENGTHS] = torch.tensor(with_rest) // cp.size
    return replace(micro_batch, padded_width=width, model_inputs=model_inputs, loss_inputs=loss_inputs)


def to_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Copy a micro-batch to the device asynchronously, from page-locked memory."""

    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.contiguous().pin_memory()
        return tensor.to(device, non_blocking=True)

    model_inputs: dict[str, Any] = {}
    for name, value in micro_batch.model_inputs.items():
        if value is None or isinstance(value, Tensor):
            model_inputs[name] = None if value is None else move(value)
        else:
            model_inputs[name] = value.moved(move)  # PackedSequences
    loss_inputs = {name: move(tensor) for name, tensor in micro_batch.loss_inputs.items()}
    return replace(micro_batch, model_inputs=model_inputs, loss_inputs=loss_inputs)


def _padding_mask(micro_batch: MicroBatch, segments: tuple[int, ...], width: int) -> Tensor:
    """bool [B, width], True on padding; over all context-parallel ranks."""
    if not micro_batch.segments:
        return torch.arange(width)[None] >= micro_batch.lengths[:, None]
    widths = torch.tensor(segments)
    lengths = torch.zeros_like(widths)
    lengths[: len(micro_batch.lengths)] = micro_batch.lengths
    starts = widths.cumsum(0) - widths
    return (torch.arange(width) >= (starts + lengths).repeat_interleave(widths))[None]
