"""This process's part of a micro-batch: pad, split each sequence over context-parallel ranks, copy to the device.

`parallel/zigzag.py` defines which chunks of a sequence a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.engine.batches.packed_rows import filled_row
from megatron_wrap.flow.contract.base import SEQUENCE_LENGTHS
from megatron_wrap.metrics.phases import COMPUTED_TOKENS, DATA, phase
from megatron_wrap.model.random_numbers import EmbeddingNoise
from megatron_wrap.parallel import zigzag
from megatron_wrap.parallel.state import Axis, ParallelState

PADDING_MASK = "padding_mask"
"""Input of an MoE model: bool [B, S], True on padding, which the routers exclude from their losses."""
NOISE = "embedding_noise"
"""Input of the model in training with `neftune_noise_alpha`: an `EmbeddingNoise`."""
PACKED = "packed_seq_params"
"""Input of the model for a packed micro-batch: the boundaries of its sequences, a `PackedSequences`."""


@dataclass(frozen=True)
class Localization:
    """Converts micro-batches to this process's part of them: padded, split over context-parallel ranks, on the
    device."""

    parallel: ParallelState
    device: torch.device
    sequence_parallel: bool
    has_experts: bool
    """Whether the model takes PADDING_MASK."""
    token_multiple: int = 1
    """Tokens of which each context-parallel rank's part of a sequence is a multiple."""
    noise_alpha: float | None = None
    """Value of `neftune_noise_alpha`, with which the model takes NOISE; None: no noise."""
    hidden_size: int = 0
    """Width of the embedding, which is the width of the noise."""

    def shard(self, micro_batches: Sequence[MicroBatch], extra_padding: int = 0) -> tuple[MicroBatch, ...]:
        """Pad the micro-batches and take this context-parallel rank's shard of each, on the CPU.

        With pipeline parallelism all micro-batches are padded to one length: if stages exchanged shapes, each
        micro-batch would synchronize with the device.

        Args:
            extra_padding: tokens of padding beyond the layout's divisor.
        """
        lengths = [micro_batch.width + extra_padding for micro_batch in micro_batches]
        if self.parallel.pp.size > 1 and lengths:
            lengths = [max(lengths)] * len(lengths)
        tp, cp = self.parallel.tp, self.parallel.cp
        divisor = zigzag.sequence_divisor(tp.size, cp.size, self.sequence_parallel, self.token_multiple)
        return tuple(
            self._with_noise(shard(micro_batch, -(-length // divisor) * divisor, cp, self.has_experts), micro_batch)
            for micro_batch, length in zip(micro_batches, lengths, strict=True)
        )

    def _with_noise(self, local: MicroBatch, whole: MicroBatch) -> MicroBatch:
        """The shard `local` of a micro-batch with NOISE, if there is any."""
        if self.noise_alpha is None:
            return local
        cp, width = self.parallel.cp, local.padded_width
        rows, columns, lengths = _tokens(whole, width)
        ids = zigzag.pad_to(whole.model_inputs["input_ids"], 1, width, 0)
        noise = EmbeddingNoise.of(ids, rows, columns, lengths, self.noise_alpha, self.hidden_size)
        noise = noise.select(zigzag.packed_positions(_segments(whole, width), cp.size, cp.rank))
        return replace(local, model_inputs={**local.model_inputs, NOISE: noise})

    def localize(self, micro_batches: Sequence[MicroBatch], extra_padding: int = 0) -> list[MicroBatch]:
        """`shard` the micro-batches unless that was done ahead, and copy them to the device."""
        with phase(DATA):
            if not all(micro_batch.padded_width for micro_batch in micro_batches):
                micro_batches = self.shard(micro_batches, extra_padding)
            tokens = sum(micro_batch.num_rows * micro_batch.padded_width for micro_batch in micro_batches)
            with phase(f"{COMPUTED_TOKENS}{tokens}"):
                return [to_device(micro_batch, self.device) for micro_batch in micro_batches]


def shard(micro_batch: MicroBatch, width: int, cp: Axis, with_padding_mask: bool = False) -> MicroBatch:
    """Pad to `width` and take this context-parallel rank's shard, on the CPU.

    A packed row is split sequence by sequence; the model's inputs then contain PACKED, the loss inputs
    SEQUENCE_LENGTHS.

    Args:
        width: in tokens over all context-parallel ranks, a multiple of the layout's divisor.
        with_padding_mask: add PADDING_MASK to the model's inputs.
    """
    seqdims, pad_values = micro_batch.seqdims, micro_batch.pad_values
    segments = _segments(micro_batch, width)
    positions = zigzag.packed_positions(segments, cp.size, cp.rank)

    def local(name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or name not in seqdims:
            return tensor
        tensor = zigzag.pad_to(tensor, seqdims[name], width, pad_values.get(name, 0))
        return tensor if cp.size == 1 else tensor.index_select(seqdims[name], positions)

    model_inputs: dict[str, Any] = {name: local(name, tensor) for name, tensor in micro_batch.model_inputs.items()}
    loss_inputs: dict[str, Any] = {name: local(name, tensor) for name, tensor in micro_batch.loss_inputs.items()}
    if with_padding_mask:
        rows, columns, lengths = _tokens(micro_batch, width)
        model_inputs[PADDING_MASK] = (columns >= lengths[rows])[:, positions]
    if micro_batch.segments:
        from megatron_wrap.nn.attention.packed_sequences import PackedSequences

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
            model_inputs[name] = value.moved(move)  # PackedSequences, EmbeddingNoise
    loss_inputs = {name: move(tensor) for name, tensor in micro_batch.loss_inputs.items()}
    return replace(micro_batch, model_inputs=model_inputs, loss_inputs=loss_inputs)


def _segments(micro_batch: MicroBatch, width: int) -> tuple[int, ...]:
    """Widths of the sequences in a row of `width` tokens; one for all rows that are not packed."""
    return filled_row(micro_batch.segments, width) if micro_batch.segments else (width,)


def _tokens(micro_batch: MicroBatch, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index of each token's sequence and its position in it, [B, width] each; tokens of each sequence."""
    if not micro_batch.segments:
        rows = torch.arange(micro_batch.num_rows)[:, None].expand(-1, width)
        return rows, torch.arange(width).expand(micro_batch.num_rows, -1), micro_batch.lengths.long()
    widths = torch.tensor(_segments(micro_batch, width))
    lengths = torch.zeros_like(widths)
    lengths[: len(micro_batch.lengths)] = micro_batch.lengths
    rows = torch.arange(len(widths)).repeat_interleave(widths)
    return rows[None], (torch.arange(width) - (widths.cumsum(0) - widths)[rows])[None], lengths
