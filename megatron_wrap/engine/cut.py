"""Cutting a global batch into the micro-batches of each replica: by number of samples, or by a budget of tokens with
equal work on all replicas; sequences padded to equal length, or packed in one row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_wrap.config import derived
from megatron_wrap.config.fp8 import token_multiple
from megatron_wrap.config.schema import RunConfig
from megatron_wrap.data.packing import (
    assign_evenly,
    even_packs,
    even_rows,
    fewest_packs,
    rows_of_similar_width,
    split_packs,
)
from megatron_wrap.engine.micro_batch import MicroBatch, collate
from megatron_wrap.engine.packed import pack, padded_length
from megatron_wrap.engine.samples import micro_batch_samples
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.metrics.throughput import ModelShape, training_flops
from megatron_wrap.parallel.context import sequence_divisor
from megatron_wrap.parallel.state import Axis, ParallelState


@dataclass(frozen=True)
class BatchCut:
    """How a batch is cut. The objective does not depend on it, because the loss is normalized over the whole step."""

    capacity: int | None = None
    """Tokens of a micro-batch, padding included; None: the flow's `micro_batch_size` samples."""
    grows: bool = False
    """A sample larger than the capacity is a micro-batch of its own, instead of an error."""
    packing: bool = False
    """All sequences of a micro-batch in one row."""
    multiple: int = 1
    """Each sequence is padded to a multiple of it."""
    rounds: int = 1
    """The number of a replica's micro-batches is a multiple of it, for an interleaved pipeline."""
    token_cost: float = 1.0
    """FLOPs of one token, without attention to others."""
    square_cost: float = 0.0
    """FLOPs of attention, divided by the squared length of a sequence."""

    def fixed(self) -> BatchCut:
        """The cut by number of samples, without packing."""
        return BatchCut(rounds=self.rounds)

    def places(self, lengths: Sequence[Sequence[int]], replicas: int) -> list[list[list[int]]]:
        """The samples of each micro-batch of each replica, if there is a `capacity`. Every replica has the same number
        of micro-batches; an empty one has no samples left for it.

        Args:
            lengths: for each sample, the tokens of each of its sequences.
        """
        sizes = [self._size(one) for one in lengths]
        capacity = self._capacity(sizes)
        costs = [self._cost(one) for one in lengths]
        packs = self.packs(lengths)
        multiple = replicas * self.rounds
        count = -(-len(packs) // multiple) * multiple
        if self.packing:
            packs = even_packs(sizes, costs, capacity, count) or packs
        else:
            packs = even_rows(*self._rows(lengths), capacity, count, lambda width: self._cost([width]))
        packs = split_packs(packs, costs, count)
        packs += [[] for _ in range(count - len(packs))]
        shares = assign_evenly([self._pack_cost([lengths[item] for item in pack]) for pack in packs], replicas)
        return [[packs[place] for place in share] for share in shares]

    def packs(self, lengths: Sequence[Sequence[int]]) -> list[list[int]]:
        """The samples of each micro-batch, as few as the `capacity` allows; for arguments and errors see `places`."""
        sizes = [self._size(one) for one in lengths]
        capacity = self._capacity(sizes)
        if self.packing:
            return fewest_packs(sizes, capacity)
        return rows_of_similar_width(*self._rows(lengths), capacity)

    def _capacity(self, sizes: Sequence[int]) -> int:
        assert self.capacity is not None
        largest = max(sizes)
        if largest > self.capacity and not self.grows:
            raise DataError(
                f"a sample of {largest} tokens, padding included, exceeds "
                f"megatron_lm.train.common.max_tokens_per_micro_batch {self.capacity}; set it to at least {largest}, "
                "or truncate samples"
            )
        return max(largest, self.capacity)

    def _size(self, lengths: Sequence[int]) -> int:
        """Tokens that a sample takes: its sequences one after the other, or each in a row of the longest's width."""
        if self.packing:
            return sum(padded_length(length, self.multiple) for length in lengths)
        return len(lengths) * padded_length(max(lengths), self.multiple)

    def _cost(self, lengths: Sequence[int]) -> float:
        """FLOPs of a sample; without packing, those of its padding, too."""
        if not self.packing:
            lengths = [max(lengths)] * len(lengths)
        return self.token_cost * sum(lengths) + self.square_cost * sum(length * length for length in lengths)

    def _pack_cost(self, lengths: Sequence[Sequence[int]]) -> float:
        """FLOPs of a micro-batch; without packing, each of its rows has the width of the widest."""
        if self.packing:
            return sum(self._cost(one) for one in lengths)
        widths, rows = self._rows(lengths)
        return sum(rows) * self._cost([max(widths, default=0)])

    def _rows(self, lengths: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The width in tokens and the number of each sample's rows, without packing."""
        return [padded_length(max(one), self.multiple) for one in lengths], [len(one) for one in lengths]


def batch_cut(config: RunConfig, parallel: ParallelState, shape: ModelShape, rounds: int) -> BatchCut:
    """How the run's batches are cut.

    Args:
        shape: determines which samples are equal work.
        rounds: the number of a replica's micro-batches must be a multiple of it.
    """
    train, packing = config.train, config.flow.packing
    row = train.micro_batch_size * train.seq_length if packing else None
    sequence_parallel = derived.sequence_parallel(config.parallel) and not packing
    linear = training_flops(shape, 1.0, 0.0)
    return BatchCut(
        capacity=row if train.max_tokens_per_micro_batch is None else train.max_tokens_per_micro_batch,
        grows=train.max_tokens_per_micro_batch is None,
        packing=packing,
        multiple=sequence_divisor(
            parallel.tp.size, parallel.cp.size, sequence_parallel, 1 if packing else token_multiple(config)
        ),
        rounds=rounds,
        token_cost=linear,
        square_cost=training_flops(shape, 0.0, 1.0),
    )


def prepare_batch(
    flow: MegatronWrapTrainingFlowBase,
    batch: Sequence[Any],
    cut: BatchCut,
    seed: int,
    dp: Axis,
    prepare: Callable[[Any], Any] | None = None,
) -> list[MicroBatch]:
    """This replica's micro-batches of a global batch: samples prepared and collated, loss weights and tokens counted,
    sequences packed. No communication: every process computes the same cut.

    If this replica has no samples for one of its micro-batches, it gets a filler, which is not counted. Samples of the
    flow's `get_step_samples` follow in micro-batches of their own, `for_step_values`, cut in the same way.

    Args:
        seed: for the flow's random choices: the run's seed plus the index of the batch's first sample in the run.
        prepare: returns the prepared sample of an item of `batch`; default: the flow's `prepare_sample`.
    """
    of_sample = _prepared_by(flow, batch) if prepare is None else lambda place: prepare(batch[place])
    prepared = functools.cache(of_sample)
    micro_batches = _micro_batches(flow, len(batch), prepared, cut, seed, dp)
    further = _step_samples(flow, len(batch), prepared)
    if further is not None:
        micro_batches += [
            replace(micro_batch, for_step_values=True)
            for micro_batch in _micro_batches(flow, len(batch), further.__getitem__, cut, seed, dp)
        ]
    return micro_batches


def _prepared_by(flow: MegatronWrapTrainingFlowBase, batch: Sequence[Any]) -> Callable[[int], Any]:
    """Place -> prepared sample; an error names the place."""

    def prepared(place: int) -> Any:
        try:
            return flow.prepare_sample(batch[place])
        except DataError as error:
            raise DataError(f"sample {place} of a batch of {len(batch)}: {error}") from error

    return prepared


def _micro_batches(
    flow: MegatronWrapTrainingFlowBase,
    num_samples: int,
    prepared: Callable[[int], Any],
    cut: BatchCut,
    seed: int,
    dp: Axis,
) -> list[MicroBatch]:
    """This replica's micro-batches of the samples `prepared(0)`, ..., `prepared(num_samples - 1)`."""
    if cut.capacity is None:
        own = [
            tuple(places)
            for _, places in micro_batch_samples(range(num_samples), flow.micro_batch_size, dp.rank, dp.size)
        ]
        own += [()] * (-(-num_samples // (flow.micro_batch_size * dp.size)) - len(own))
    else:
        lengths = [sample_lengths(flow, prepared(place), seed + place) for place in range(num_samples)]
        own = [tuple(places) for places in cut.places(lengths, dp.size)[dp.rank]]
    micro_batches = [
        replace(collate(flow, [prepared(place) for place in places], seed + places[0]), places=places)
        if places
        else replace(collate(flow, [prepared(0)], seed), counted=False)
        for places in own
    ]
    if cut.capacity is not None and not micro_batches[0].has_explicit_weight:
        raise FlowError(
            f"{type(flow).__name__}: the loss is a mean over each micro-batch, so it depends on how a batch is cut by "
            "packing or max_tokens_per_micro_batch; return LossOutput with the sum of the loss, and define "
            "get_loss_weight"
        )
    return [pack(micro_batch, cut.multiple) for micro_batch in micro_batches] if cut.packing else micro_batches


def _step_samples(
    flow: MegatronWrapTrainingFlowBase, num_samples: int, prepared: Callable[[int], Any]
) -> Sequence[Any] | None:
    """The samples of the flow's `get_step_samples`; None: those of the batch."""
    own = type(flow).get_step_samples is not MegatronWrapTrainingFlowBase.get_step_samples
    if flow.step_values_from is None or not own:  # then a replica does not prepare the samples of others
        return None
    samples = flow.get_step_samples([prepared(place) for place in range(num_samples)])
    if samples is not None and len(samples) != num_samples:
        raise FlowError(
            f"{type(flow).__name__}.get_step_samples returns {len(samples)} samples for a batch of {num_samples}; "
            "return one for each sample, or None"
        )
    return samples


def sample_lengths(flow: MegatronWrapTrainingFlowBase, sample: Any, seed: int) -> list[int]:
    """Tokens of each sequence of a prepared sample: those that the flow returns, else those of the sample collated
    alone."""
    lengths = flow.get_sample_lengths(sample)
    return collate(flow, [sample], seed).lengths.tolist() if lengths is None else [int(length) for length in lengths]
