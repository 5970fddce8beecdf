"""The global batches of a run, prepared ahead of their steps: read, tokenized, collated, counted, packed and split over
context-parallel ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from megatron_wrap.config import derived
from megatron_wrap.config.schema import RunConfig
from megatron_wrap.data.batching import BatchPlan, BatchRule, Cursor, PlannedBatch, TokenBudget
from megatron_wrap.data.reader import Preparation, PreparedSamples, SampleReader
from megatron_wrap.data.stream import SampleStream
from megatron_wrap.data.workers import Workers
from megatron_wrap.engine.cut import BatchCut, prepare_batch, sample_lengths
from megatron_wrap.engine.prepared import PreparedBatch, batch_key
from megatron_wrap.engine.state import Progress, TrainingState
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.utils.dist_logger import logger

_SHOWN_BAD_ROWS = 5


class BatchLoader:
    """The batches of a run from where its progress is; equal on every rank but for the micro-batches.

    Args:
        state: of the run; its flow is called in the workers, where attributes that it sets are not seen here.
        stream: the order of samples; each worker reads a copy of its own.
        stored: samples prepared before, by position of the stream; None: there are none.
    """

    def __init__(
        self,
        state: TrainingState,
        stream: SampleStream,
        stored: PreparedSamples | None = None,
    ) -> None:
        config = state.config
        self._stream, self._stored = stream, stored
        self._flow, self._cut, self._dp = state.flow, state.cut, state.parallel.dp
        self._schedule = state.schedule
        self._config, self._rule = config, batch_rule(config, state.cut)
        self._device = state.platform.device
        self._receiver: ThreadPoolExecutor | None = None
        self._coming: Future[PreparedBatch] | None = None
        self._workers: Workers | None = None
        self._here: Iterator[PreparedBatch] | None = None
        self._next: Cursor | None = None
        self._shown = 0
        multiple = self._dp.size * self._cut.rounds
        if self._rule.budget is not None and self._rule.budget.packs % multiple:
            logger.warning_rank_0(
                f"megatron_lm.train.common.global_batch_tokens {config.train.global_batch_tokens} is "
                f"{self._rule.budget.packs} micro-batches for {multiple} at a time, so some are split or empty; "
                "choose a multiple"
            )

    def next(self, progress: Progress) -> PreparedBatch:
        """The batch of the next step.

        Args:
            progress: of the run. Where it is not behind the batch before, loading starts anew from it.

        Raises:
            DataError: a row cannot be used; the message begins with file and row.
            TrainingError: a worker process has died.
        """
        cursor = Cursor.of(progress.consumed_samples, progress.data)
        if cursor != self._next:
            self.close()
            self._start(cursor)
        batch: PreparedBatch = next(self._here) if self._here is not None else self._received()
        self._next = batch.after
        for text in batch.bad_rows[: _SHOWN_BAD_ROWS - self._shown]:
            logger.warning_rank_0(f"left out (megatron_wrap.data.on_bad_sample: skip): {text}")
            self._shown += 1
        return batch

    def close(self) -> None:
        """End the worker processes."""
        if self._workers is not None:
            self._workers.close()
        if self._receiver is not None:
            self._receiver.shutdown()  # after the workers' end, for which it may be waiting
        self._receiver = self._coming = None
        self._workers = self._here = self._next = None

    def _start(self, cursor: Cursor) -> None:
        count = self._config.data.num_workers
        if count == 0:
            self._here = (PreparedBatch(*parts) for parts in self._batches(cursor, 0, 1))
            return
        self._workers = Workers(
            lambda worker, workers: self._batches(cursor, worker, workers),
            count,
            self._config.data.prefetch_batches,
            pin_memory=self._device.type == "cuda",
        )

    def _received(self) -> PreparedBatch:
        """The next batch, which a thread has received during the step before: copying it takes milliseconds, in which
        the device would wait."""
        if self._receiver is None:
            device = self._device
            # page-locked memory is allocated on the current device of the thread
            select = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else None
            self._receiver = ThreadPoolExecutor(1, "batches", initializer=select)
            self._coming = self._receiver.submit(self._from_workers)
        assert self._coming is not None
        batch = self._coming.result()
        self._coming = self._receiver.submit(self._from_workers)
        return batch

    def _from_workers(self) -> PreparedBatch:
        assert self._workers is not None
        return PreparedBatch(*self._workers.next())

    def _batches(self, cursor: Cursor, worker: int, workers: int) -> Iterator[tuple[Any, ...]]:
        """The arguments of `PreparedBatch` for every `workers`-th batch, from batch `worker` after `cursor` on."""
        reader = sample_reader(self._config, self._stream, self._flow, self._rule.budget, self._stored)
        plan = BatchPlan(reader, self._rule, cursor)
        number = 0
        while True:
            planned = plan.next()
            if number % workers == worker:
                yield self._prepare(reader, planned)
            reader.forget(planned.positions)
            number += 1

    def _prepare(self, reader: SampleReader, planned: PlannedBatch) -> tuple[Any, ...]:
        seed = self._config.train.seed + planned.before.consumed
        samples = [reader.sample(place) for place in planned.positions]
        micro_batches = prepare_batch(self._flow, planned.positions, self._cut, seed, self._dp, prepare=reader.prepared)
        micro_batches = self._schedule.shard(micro_batches)
        key = batch_key(self._cut, seed, self._dp)
        return samples, planned.before, planned.after, planned.bad_rows, micro_batches, key


def preparation(flow: MegatronWrapTrainingFlowBase, seed: int) -> Preparation:
    """What a flow does with one sample."""
    return Preparation(flow.prepare_sample, lambda sample: sample_lengths(flow, sample, seed))


def sample_reader(
    config: RunConfig,
    stream: SampleStream,
    flow: MegatronWrapTrainingFlowBase,
    budget: TokenBudget | None,
    stored: PreparedSamples | None,
) -> SampleReader:
    """Reads the samples of a stream for a run; arguments as of `BatchLoader` and `BatchRule`."""
    return SampleReader(
        stream,
        preparation(flow, config.train.seed),
        skip_bad=config.data.on_bad_sample == "skip",
        needs_lengths=budget is not None,
        max_lengths={
            source.name: source.max_length
            for source in derived.training_sources(config)
            if source.max_length is not None
        },
        check_lengths=None if budget is None else lambda lengths: budget.pack([lengths]),
        stored=stored,
    )


def batch_rule(config: RunConfig, cut: BatchCut) -> BatchRule:
    """How the samples of a run form global batches."""
    train = config.train
    budget = None
    if train.global_batch_tokens is not None:
        capacity = train.micro_batch_size * train.seq_length if cut.capacity is None else cut.capacity
        budget = TokenBudget(
            pack=replace(cut, capacity=capacity).packs,
            packs=max(1, train.global_batch_tokens // capacity),
            window=config.data.packing_window,
        )
    return BatchRule(train.seed, lambda consumed: derived.global_batch_size_at(config, consumed), budget)
