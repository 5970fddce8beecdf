"""The global batches of a run, prepared ahead of their steps: read, tokenized, collated, counted, packed and split over
context-parallel ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.order.batching import BatchPlan, BatchRule, Cursor, PlannedBatch, TokenBudget
from megatron_wrap.data.order.sample_reader import Preparation, PreparedSamples, SampleReader
from megatron_wrap.data.order.stream import SampleStream
from megatron_wrap.data.order.workers import Workers
from megatron_wrap.engine.batches.global_batch import BatchParts, PreparedBatch, batch_key
from megatron_wrap.engine.batches.micro_batch import Localization
from megatron_wrap.engine.batches.micro_batching import MicroBatching, sample_lengths, split_batch
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.progress import WorkProgress

_SHOWN_BAD_ROWS = 5
_LONGEST_DELAY = 1.0
"""Longest time in seconds for which the receipt of a batch is delayed until the host waits for the device."""


class BatchLoader:
    """The batches of a run from a cursor on; equal on every rank except for the micro-batches.

    Args:
        config: of the run.
        flow: is called in the workers; attributes that it sets there are not seen here.
        of_sample: from `preparation`.
        micro_batching, localization: of the run.
        stream: the order of samples; each worker reads a copy of its own.
        cached: samples prepared before, by position of the stream; None: there are none.
        host_waits: the event of the run's `MetricReduction` during which the next batch is received.
    """

    def __init__(
        self,
        config: RunConfig,
        flow: MegatronWrapTrainingFlowBase,
        of_sample: Preparation,
        micro_batching: MicroBatching,
        localization: Localization,
        stream: SampleStream,
        cached: PreparedSamples | None,
        host_waits: threading.Event,
    ) -> None:
        self._config, self._rule = config, batch_rule(config, micro_batching)
        self._flow, self._preparation = flow, of_sample
        self._micro_batching, self._localization = micro_batching, localization
        self._stream, self._cached, self._host_waits = stream, cached, host_waits
        self._loading: Generator[PreparedBatch] | None = None
        self._next: Cursor | None = None
        self._left_out: Collection[int] = frozenset()
        self._shown = 0
        multiple = localization.parallel.dp.size * micro_batching.num_microbatches_multiple
        if self._rule.budget is not None and self._rule.budget.num_bins % multiple:
            logger.warning_rank_0(
                f"megatron_lm.train.common.global_batch_tokens {config.train.global_batch_tokens} is "
                f"{self._rule.budget.num_bins} micro-batches for {multiple} at a time, so some are split or empty; "
                "choose a multiple"
            )

    def next(self, cursor: Cursor, left_out: Collection[int] = frozenset()) -> PreparedBatch:
        """The batch of the next step.

        Args:
            cursor: of the run. If it differs from the one after the previous batch, loading starts again from it.
            left_out: positions whose samples are in no batch; a change of them also starts the loading again.

        Raises:
            DataError: a row cannot be used; the message begins with file and row.
            TrainingError: a worker process has died.
        """
        if self._loading is None or cursor != self._next or left_out != self._left_out:
            self.close()
            self._left_out = left_out
            self._loading = self._batches_from(cursor)
        batch = next(self._loading)
        self._next = batch.after
        for text in batch.bad_rows[: _SHOWN_BAD_ROWS - self._shown]:
            logger.warning_rank_0(f"left out (megatron_wrap.data.on_bad_sample: skip): {text}")
            self._shown += 1
        return batch

    def close(self) -> None:
        """End the worker processes."""
        if self._loading is not None:
            self._loading.close()
            self._loading = None

    def _batches_from(self, cursor: Cursor) -> Generator[PreparedBatch]:
        count = self._config.data.num_workers
        if count == 0:
            yield from map(PreparedBatch, self._batches(cursor, 0, 1))
            return
        device = self._localization.device
        # page-locked memory is allocated on the current device of the thread
        select = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        workers = Workers(
            lambda worker, workers: self._batches(cursor, worker, workers),
            count,
            self._config.data.prefetch_batches,
            pin_memory=device.type == "cuda",
        )

        def receive(used: list[PreparedBatch]) -> PreparedBatch:
            self._host_waits.wait(_LONGEST_DELAY)
            used.clear()  # to free some 100,000 numbers also takes milliseconds
            return PreparedBatch(workers.next())

        # The thread receives a batch during the step before. That takes milliseconds, most of them with Python's lock:
        # at the beginning of a step the device would wait for kernels that this thread cannot queue meanwhile. It may
        # wait for a worker, so the workers end first.
        with ThreadPoolExecutor(1, "batches", initializer=select) as thread, contextlib.closing(workers):
            used: list[PreparedBatch] = []
            coming = thread.submit(receive, used)
            try:
                while True:
                    self._host_waits.set()
                    batch = coming.result()
                    self._host_waits.clear()
                    coming, used = thread.submit(receive, used), [batch]
                    yield batch
            finally:
                self._host_waits.set()

    def _batches(self, cursor: Cursor, worker: int, workers: int) -> Iterator[BatchParts]:
        """Every `workers`-th batch, beginning with batch `worker` after `cursor`."""
        reader = sample_reader(self._config, self._stream, self._preparation, self._rule.budget, self._cached)
        plan = BatchPlan(reader, self._rule, cursor, self._left_out)
        for number in itertools.count():
            planned = plan.next()
            if number % workers == worker:
                yield self._prepare(reader, planned)
            reader.forget(planned.positions)

    def _prepare(self, reader: SampleReader, planned: PlannedBatch) -> BatchParts:
        seed = self._config.train.seed + planned.before.consumed
        dp, positions = self._localization.parallel.dp, planned.positions

        micro_batches = split_batch(
            self._flow,
            len(positions),
            lambda index: reader.prepared(positions[index]),
            self._micro_batching,
            seed,
            dp,
            lambda index: reader.where(positions[index]),
        )
        return BatchParts(
            samples=[reader.sample(position) for position in positions],
            before=planned.before,
            after=planned.after,
            bad_rows=planned.bad_rows,
            micro_batches=replace(
                micro_batches,
                training=self._localization.shard(micro_batches.training),
                statistics=self._localization.shard(micro_batches.statistics),
            ),
            key=batch_key(self._micro_batching, seed, dp),
            where=tuple(map(reader.where, positions)),
            positions=positions,
        )


def preparation(flow: MegatronWrapTrainingFlowBase, prepare_sample: Callable[[Any], Any], seed: int) -> Preparation:
    """The preparation that a run applies to one sample before it is collated with others.

    Args:
        prepare_sample: of the run, see `TrainingState`.
    """
    return Preparation(prepare_sample, lambda sample: sample_lengths(flow, sample, seed))


def sample_reader(
    config: RunConfig,
    stream: SampleStream,
    of_sample: Preparation,
    budget: TokenBudget | None,
    cached: PreparedSamples | None,
) -> SampleReader:
    """The reader of a stream's samples for a run; arguments as of `BatchLoader` and `BatchRule`."""
    return SampleReader(
        stream,
        of_sample,
        skip_bad=config.data.on_bad_sample == "skip",
        needs_lengths=budget is not None,
        max_lengths={
            source.name: source.max_length
            for source in derived.training_sources(config)
            if source.max_length is not None
        },
        check_lengths=None if budget is None else lambda lengths: budget.pack([lengths]),
        cached=cached,
    )


def batch_rule(config: RunConfig, micro_batching: MicroBatching) -> BatchRule:
    """The rule by which the samples of a run form global batches."""
    train = config.train
    budget = None
    if train.global_batch_tokens is not None:
        capacity = micro_batching.capacity or train.micro_batch_size * train.seq_length
        budget = TokenBudget(
            pack=replace(micro_batching, capacity=capacity).bins,
            num_bins=max(1, train.global_batch_tokens // capacity),
            window=config.data.packing_window,
        )
    return BatchRule(train.seed, lambda consumed: derived.global_batch_size_at(config, consumed), budget)


def steps_of_epochs(epochs: float, samples_per_epoch: int, rule: BatchRule, reader: SampleReader) -> int:
    """Steps until the run has consumed `epochs` of its data; the last one may extend into the next epoch.

    With batches of a fixed number of samples, only the number of samples is needed; rows that will be left out do not
    change it, because others replace them. For batches of tokens the samples' lengths are read, which takes seconds
    with a tokenized cache.

    Args:
        epochs: above 0.
        samples_per_epoch: of the training set.
        rule: how samples form batches.
        reader: of the training set.

    Raises:
        DataError: a row cannot be used.
    """
    num_samples = max(1, round(epochs * samples_per_epoch))
    steps = done = 0
    if rule.budget is None:
        while done < num_samples:
            done += rule.samples_at(done)
            steps += 1
        return steps
    plan = BatchPlan(reader, rule, Cursor())
    with WorkProgress("lengths of the samples", num_samples, "sample") as progress:
        while done < num_samples:
            planned = plan.next()
            reader.forget(planned.positions)
            count = len(planned.positions) + len(planned.bad_rows)
            progress.advance(min(count, num_samples - done))
            done += count
            steps += 1
    return steps
