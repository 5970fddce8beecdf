"""Splits a global batch into the micro-batches of each replica: by number of samples, or by a budget of tokens with
equal work on all replicas; sequences padded to equal length, or packed in one row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import token_multiple
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.order.bin_packing import (
    assign_evenly,
    even_bins,
    even_rows,
    fewest_bins,
    rows_of_similar_width,
    split_bins,
)
from megatron_wrap.engine.batches.collation import collate
from megatron_wrap.engine.batches.global_batch import micro_batch_indices
from megatron_wrap.engine.batches.micro_batch import MicroBatch, ReplicaMicroBatches, pack, padded_length
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.parallel.state import Axis, ParallelState
from megatron_wrap.parallel.zigzag import sequence_divisor
from megatron_wrap.plan.flops import training_flops
from megatron_wrap.plan.model_parts import ModelShape


@dataclass(frozen=True)
class MicroBatching:
    """The rule by which a global batch is split. The objective does not depend on it, because the loss is normalized
    over the whole step."""

    capacity: int | None = None
    """Limit of a micro-batch in tokens, padding included; None: micro-batches of the flow's `micro_batch_size`
    samples."""
    allow_oversized: bool = False
    """Whether a sample larger than the capacity is a micro-batch of its own, instead of an error."""
    packing: bool = False
    """Whether all sequences of a micro-batch are in one row."""
    pad_to_multiple_of: int = 1
    """Tokens of which each padded sequence's length is a multiple."""
    num_microbatches_multiple: int = 1
    """Number of which a replica's number of micro-batches is a multiple, for an interleaved pipeline."""
    token_cost: float = 1.0
    """FLOPs of one token, without attention to other tokens."""
    square_cost: float = 0.0
    """FLOPs of attention, divided by the squared length of a sequence."""

    def by_samples(self) -> MicroBatching:
        """A copy that splits by number of samples, without packing."""
        return MicroBatching(num_microbatches_multiple=self.num_microbatches_multiple)

    def assign(self, lengths: Sequence[Sequence[int]], replicas: int) -> list[list[list[int]]]:
        """The sample indices of each micro-batch of each replica, if there is a `capacity`. Every replica has the same
        number of micro-batches; one for which no samples are left is empty.

        Args:
            lengths: for each sample, the tokens of each of its sequences.

        Raises:
            DataError: a sample is larger than the capacity, unless `allow_oversized`.
        """
        bins = self.bins(lengths)
        sizes = [self._size(of_sample) for of_sample in lengths]
        costs = [self._cost(of_sample) for of_sample in lengths]
        capacity = self._capacity(sizes)
        multiple = replicas * self.num_microbatches_multiple
        count = -(-len(bins) // multiple) * multiple
        if self.packing:
            bins = even_bins(sizes, costs, capacity, count) or bins
        else:
            bins = even_rows(*self._rows(lengths), capacity, count, lambda width: self._cost([width]))
        bins = split_bins(bins, costs, count)
        bins += [[] for _ in range(count - len(bins))]
        bin_costs = [self._bin_cost([lengths[index] for index in indices]) for indices in bins]
        return [[bins[number] for number in share] for share in assign_evenly(bin_costs, replicas)]

    def bins(self, lengths: Sequence[Sequence[int]]) -> list[list[int]]:
        """The sample indices of each micro-batch, as few as the `capacity` allows; arguments and errors of `assign`."""
        sizes = [self._size(of_sample) for of_sample in lengths]
        capacity = self._capacity(sizes)
        if self.packing:
            return fewest_bins(sizes, capacity)
        return rows_of_similar_width(*self._rows(lengths), capacity)

    def _capacity(self, sizes: Sequence[int]) -> int:
        assert self.capacity is not None
        largest = max(sizes)
        if largest > self.capacity and not self.allow_oversized:
            raise DataError(
                f"a sample of {largest} tokens, padding included, exceeds "
                f"megatron_lm.train.common.max_tokens_per_micro_batch {self.capacity}; set it to at least {largest}, "
                "or truncate samples"
            )
        return max(largest, self.capacity)

    def _size(self, lengths: Sequence[int]) -> int:
        """Tokens that a sample takes: its sequences concatenated, or each in a row of the longest one's width."""
        if self.packing:
            return sum(padded_length(length, self.pad_to_multiple_of) for length in lengths)
        return len(lengths) * padded_length(max(lengths), self.pad_to_multiple_of)

    def _cost(self, lengths: Sequence[int]) -> float:
        """FLOPs of a sample; without packing, padding included."""
        if not self.packing:
            lengths = [max(lengths)] * len(lengths)
        return self.token_cost * sum(lengths) + self.square_cost * sum(length * length for length in lengths)

    def _bin_cost(self, lengths: Sequence[Sequence[int]]) -> float:
        """FLOPs of a micro-batch; without packing, each of its rows has the width of the widest."""
        if self.packing:
            return sum(self._cost(of_sample) for of_sample in lengths)
        widths, rows = self._rows(lengths)
        return sum(rows) * self._cost([max(widths, default=0)])

    def _rows(self, lengths: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The width in tokens and the number of each sample's rows, without packing."""
        widths = [padded_length(max(of_sample), self.pad_to_multiple_of) for of_sample in lengths]
        return widths, [len(of_sample) for of_sample in lengths]


def micro_batching_of(
    config: RunConfig, parallel: ParallelState, shape: ModelShape, num_microbatches_multiple: int
) -> MicroBatching:
    """The rule by which the run's batches are split.

    Args:
        shape: determines which samples are equal work.
        num_microbatches_multiple: see `MicroBatching`.
    """
    train, packing, flops = config.train, config.flow.packing, training_flops(shape)
    row = train.micro_batch_size * train.seq_length if packing else None
    sequence_parallel = derived.sequence_parallel(config.parallel) and not packing
    return MicroBatching(
        capacity=row if train.max_tokens_per_micro_batch is None else train.max_tokens_per_micro_batch,
        allow_oversized=train.max_tokens_per_micro_batch is None,
        packing=packing,
        pad_to_multiple_of=sequence_divisor(
            parallel.tp.size, parallel.cp.size, sequence_parallel, 1 if packing else token_multiple(config)
        ),
        num_microbatches_multiple=num_microbatches_multiple,
        token_cost=flops.per_token,
        square_cost=flops.per_square,
    )


def check_parts(sizes: Sequence[int], rule: MicroBatching, micro_batch_size: int, dp_size: int) -> None:
    """Raise a DataError if a part of a step cannot be split into micro-batches of one size or, for an interleaved
    pipeline, into a multiple of its stages.

    Args:
        sizes: samples of each part, over all replicas.
        rule: the rule of the run.
    """
    if rule.capacity is not None:
        return
    multiple = rule.num_microbatches_multiple
    unit = micro_batch_size * dp_size * multiple
    for number, size in enumerate(sizes, 1):
        if size % unit:
            of_pipeline = f" x {multiple} of the interleaved pipeline" if multiple > 1 else ""
            raise DataError(
                f"wrap.count_weights: part {number} has {counted(size, 'sample')}, which is not a multiple of {unit} "
                f"(micro_batch_size {micro_batch_size} x data-parallel size {dp_size}{of_pipeline}); split the batch "
                "at other samples"
            )


def split_batch(
    flow: MegatronWrapTrainingFlowBase,
    num_samples: int,
    prepared_sample: Callable[[int], Any],
    micro_batching: MicroBatching,
    seed: int,
    dp: Axis,
    name_of: Callable[[int], str],
) -> ReplicaMicroBatches:
    """This replica's micro-batches of a global batch: samples prepared and collated, loss weights and tokens counted,
    sequences packed. No communication: every process computes the same split.

    A micro-batch for which this replica has no samples is a filler, which is not counted.

    Args:
        prepared_sample: index in the batch -> prepared sample.
        seed: for the flow's random choices: the run's seed plus the index of the batch's first sample in the run.
        name_of: index in the batch -> the sample's name in messages.

    Raises:
        DataError: a sample is wrong, and named by the message, or larger than the capacity. FlowError: the flow breaks
            its contract.
    """
    prepared_sample = functools.cache(prepared_sample)

    def split(prepared_sample: Callable[[int], Any]) -> tuple[MicroBatch, ...]:
        def collated(*of_micro_batch: int) -> MicroBatch:
            samples = [prepared_sample(index) for index in of_micro_batch]
            return collate(flow, samples, seed + of_micro_batch[0], lambda index: name_of(of_micro_batch[index]))

        def lengths_of(index: int) -> list[int]:
            return sample_lengths(flow, prepared_sample(index), seed + index, lambda _: name_of(index))

        indices: list[Sequence[int]]
        if micro_batching.capacity is None:
            indices = [*micro_batch_indices(num_samples, flow.micro_batch_size, dp)]
            indices += [()] * (-(-num_samples // (flow.micro_batch_size * dp.size)) - len(indices))
        else:
            lengths = list(map(lengths_of, range(num_samples)))
            indices = [*micro_batching.assign(lengths, dp.size)[dp.rank]]
        micro_batches = [
            replace(collated(*of_micro_batch), sample_indices=tuple(of_micro_batch))
            if of_micro_batch
            else replace(collated(0), counted=False, sample_facts=())
            for of_micro_batch in indices
        ]
        if micro_batching.capacity is not None and not micro_batches[0].has_explicit_weight:
            raise FlowError(
                f"{type(flow).__name__}: the loss is a mean over each micro-batch, so it depends on how a batch is "
                "split by packing or max_tokens_per_micro_batch; return LossOutput with the sum of the loss, and "
                "define get_loss_weight"
            )
        if micro_batching.packing:
            micro_batches = [pack(micro_batch, micro_batching.pad_to_multiple_of) for micro_batch in micro_batches]
        return tuple(micro_batches)

    training = split(prepared_sample)
    step_samples = _step_samples(flow, num_samples, prepared_sample)
    return ReplicaMicroBatches(training, () if step_samples is None else split(step_samples.__getitem__))


def prepared_samples(
    prepare_sample: Callable[[Any], Any], batch: Sequence[Any], name_of: Callable[[int], str]
) -> Callable[[int], Any]:
    """Index in the batch -> prepared sample; an error begins with the sample's name.

    Args:
        name_of: as for `split_batch`.
    """

    def prepared(index: int) -> Any:
        try:
            return prepare_sample(batch[index])
        except DataError as error:
            raise DataError(f"{name_of(index)}: {error}") from error

    return prepared


def names_by_index(batch: Sequence[Any]) -> Callable[[int], str]:
    """The names of samples whose files and rows are not known."""
    return lambda index: f"sample {index} of a batch of {len(batch)}"


def _step_samples(
    flow: MegatronWrapTrainingFlowBase, num_samples: int, prepared_sample: Callable[[int], Any]
) -> Sequence[Any] | None:
    """The samples of the flow's `get_step_samples`; None: those of the batch."""
    if flow.step_values_from is None or not has_step_samples(flow):  # then a replica prepares no samples of others
        return None
    samples = flow.get_step_samples([prepared_sample(index) for index in range(num_samples)])
    if samples is not None and len(samples) != num_samples:
        raise FlowError(
            f"{type(flow).__name__}.get_step_samples returns {counted(len(samples), 'sample')} for a batch of "
            f"{num_samples}; return one for each sample, or None"
        )
    return samples


def has_step_samples(flow: MegatronWrapTrainingFlowBase) -> bool:
    """Whether the flow defines `get_step_samples`."""
    return type(flow).get_step_samples is not MegatronWrapTrainingFlowBase.get_step_samples


def sample_lengths(
    flow: MegatronWrapTrainingFlowBase, sample: Any, seed: int, name_of: Callable[[int], str] | None = None
) -> list[int]:
    """Tokens of each sequence of a prepared sample: from the flow, else from the sample collated alone, with `name_of`
    as of `collate`."""
    lengths = flow.get_sample_lengths(sample)
    if lengths is None:
        return collate(flow, [sample], seed, name_of).lengths.tolist()
    return [int(length) for length in lengths]
