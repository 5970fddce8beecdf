"""A micro-batch, in one form from the collator to the model: collated, packed in one row, this process's shard of it,
on the device; and the counts over all micro-batches of a step.

`parallel/zigzag.py` defines which chunks of a sequence a context-parallel rank has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.base import SEQUENCE_LENGTHS
from megatron_wrap.flow.contract.collated import (
    check_terms,
)
from megatron_wrap.metrics.phases import COMPUTED_TOKENS, DATA, phase
from megatron_wrap.model.random_numbers import EmbeddingNoise
from megatron_wrap.parallel import zigzag
from megatron_wrap.parallel.collectives import ProcessGroup, all_reduce_values
from megatron_wrap.parallel.state import Axis, ParallelState


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of this replica: full sequences after `collate`, this process's part after `shard`."""

    model_inputs: dict[str, Any]
    """Tensors, or None; after `shard` of a packed row also a `PackedSequences`."""
    loss_inputs: dict[str, Tensor]
    weights: dict[str, float]
    """Loss weight of each term, counted on the full micro-batch."""
    num_samples: int
    """Number of samples it was collated from."""
    lengths: Tensor
    """[N], tokens of each sequence without padding; a flow may collate several sequences from one sample."""
    width: int
    """Sequence length of the collated tensors."""
    segments: tuple[int, ...] = ()
    """Tokens of each sequence with its padding, if all sequences are in one row; () if each has its own."""
    seqdims: Mapping[str, int] = field(default_factory=dict)
    """Field -> its sequence dimension."""
    pad_values: Mapping[str, float] = field(default_factory=dict)
    """Field -> padding value; a field not listed is padded with 0."""
    padded_width: int = 0
    """Sequence length after padding to the layout's divisor, over all context-parallel ranks; 0 before `shard`."""
    counted: bool = True
    """False for a filler, which lets a replica without samples take part in the collectives; it adds 0 to all sums."""
    has_explicit_weight: bool = True
    """False if the flow's `get_loss_weight` returns None; the micro-batch then has the default weight 1."""
    has_loss: bool = True
    """The flow's `has_loss`, of the full micro-batch."""
    sample_indices: tuple[int, ...] = ()
    """Indices of its samples in the global batch; () for a filler."""
    sample_facts: tuple[Any, ...] = ()
    """The flow's `get_sample_facts` of each sample; () for a filler."""

    @property
    def is_trained(self) -> bool:
        """Whether its loss has a weight and can have a gradient."""
        return self.has_loss and any(self.weights.values())

    @property
    def num_rows(self) -> int:
        """Batch dimension B of the collated tensors."""
        return 1 if self.segments else self.lengths.shape[0]

    def without_model_inputs(self, names: Collection[str]) -> MicroBatch:
        """A copy with fewer inputs of the model."""
        kept = {name: value for name, value in self.model_inputs.items() if name not in names}
        return replace(self, model_inputs=kept)


@dataclass(frozen=True)
class ReplicaMicroBatches:
    """This replica's micro-batches of one global batch, or of a part of one."""

    training: tuple[MicroBatch, ...]
    statistics: tuple[MicroBatch, ...] = ()
    """Micro-batches of the samples of the flow's `get_step_samples`, from which the statistics of the whole step are
    computed instead of from `training`; () if the flow returns none."""


@dataclass(frozen=True)
class StepCounts:
    """Sums over all micro-batches and replicas of one step, known before the forward pass."""

    weights: dict[str, float]
    """Weight of each loss term."""
    tokens: int
    """Tokens without padding."""
    squared_lengths: float
    """Sum over sequences of their squared length, for the FLOPs of attention."""
    is_trained: bool
    """Whether a micro-batch is trained; else the step is skipped. The same on every rank."""


def count_step(
    flow: MegatronWrapTrainingFlowBase, micro_batches: Sequence[MicroBatch], group: ProcessGroup
) -> StepCounts:
    """Sum the weights and tokens of the step over replicas, in one all-reduce. Collective.

    Args:
        micro_batches: of this replica, from `prepare_batch`.
        group: the replicas, for tensors on the host, so that the sum does not wait for the device.
    """
    terms = check_terms(flow, [micro_batch.weights for micro_batch in micro_batches])
    counted = [micro_batch for micro_batch in micro_batches if micro_batch.counted]
    numbers = [sum(micro_batch.weights[term] for micro_batch in counted) for term in terms]
    numbers.append(sum(int(micro_batch.lengths.sum()) for micro_batch in counted))
    numbers.append(sum(float((micro_batch.lengths.double() ** 2).sum()) for micro_batch in counted))
    numbers.append(sum(micro_batch.is_trained for micro_batch in counted))
    *weights, tokens, squares, trained = all_reduce_values(numbers, group, torch.device("cpu"))
    return StepCounts(dict(zip(terms, weights, strict=True)), round(tokens), squares, trained > 0)


def padded_length(length: int, multiple: int) -> int:
    """Tokens of a sequence in a row: at least one, rounded up to a multiple of `multiple`."""
    return -(-max(1, length) // multiple) * multiple


def pack(micro_batch: MicroBatch, pad_to_multiple_of: int) -> MicroBatch:
    """Concatenate the sequences [B, S] of a micro-batch to one row [1, T]. Fields without a sequence dimension stay as
    collated, one entry for each sequence or sample.

    Args:
        pad_to_multiple_of: tokens to a multiple of which each sequence is padded: 2 * cp_size with context parallelism,
            which splits each sequence into so many chunks; else 1.
    """
    lengths = micro_batch.lengths.numpy()
    segments = np.array([padded_length(length, pad_to_multiple_of) for length in lengths])
    rows = np.repeat(np.arange(len(segments)), segments)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(segments) - segments, segments)
    is_padding = torch.from_numpy(columns >= lengths[rows])
    indices = (torch.from_numpy(rows), torch.from_numpy(np.minimum(columns, micro_batch.width - 1)))

    def packed(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            name: one_row(tensor, micro_batch.seqdims[name], micro_batch.pad_values.get(name, 0))
            if tensor is not None and name in micro_batch.seqdims
            else tensor
            for name, tensor in fields.items()
        }

    def one_row(tensor: Tensor, dim: int, pad_value: float) -> Tensor:
        tokens = tensor.movedim(dim, 1)[indices]
        tokens[is_padding] = pad_value
        return tokens[None].movedim(1, dim)

    return replace(
        micro_batch,
        model_inputs=packed(micro_batch.model_inputs),
        loss_inputs=packed(micro_batch.loss_inputs),
        width=len(rows),
        segments=tuple(segments.tolist()),
    )


def filled_row(segments: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The lengths of a row's sequences, followed by those of sequences of padding that fill the row up to `width`, none
    longer than the longest sequence of the row."""
    missing, longest = width - sum(segments), max(segments)
    rest = (missing % longest,) if missing % longest else ()
    return (*segments, *(longest,) * (missing // longest), *rest)


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
