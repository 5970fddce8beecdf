"""The samples of a run: batches, evaluation sets, and the number of steps if the run's length is set in epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_wrap.bridge.adapters.trained_parameters import trained_shape
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.training import check_schedule
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.schema import derived
from megatron_wrap.data.indexed.windows import IndexedData, open_indexed
from megatron_wrap.data.order.sample_sets import stream_of, training_stream, validation_sets
from megatron_wrap.data.order.stream import SampleStream
from megatron_wrap.engine.batches.loader import BatchLoader, batch_rule, preparation, sample_reader, steps_of_epochs
from megatron_wrap.engine.batches.micro_batching import micro_batching_of
from megatron_wrap.engine.batches.tokenized import cached_samples
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.metrics.phases import DATA, phase
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.setup.flow import build_flow, sample_preparation
from megatron_wrap.utils.dist_logger import logger


class RunData:
    """The data that `megatron_wrap.data` selects. Indexed files are opened once.

    Args:
        config: the run's configuration.
        tokenizer: the run's Hugging Face tokenizer, or None.
    """

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._indexed: IndexedData | None = None
        self._closed = False
        self.loaders: list[BatchLoader] = []
        """Loaders of the iterators over batches that are in use."""

    def batches(self, state: TrainingState, samples: Sequence[Any] | None) -> Iterator[list[Any]]:
        """The batches that follow the progress of `state`; see `MegatronWrap.batches`."""
        config = self._config
        prepare = preparation(state.flow, state.prepare_sample, config.train.seed)
        cached = None
        if samples is None:
            stream = self.training_stream()
            cached = cached_samples(config, derived.training_sources(config), stream, state.flow, prepare)
        else:
            stream = stream_of(samples, config.train.seed, config.data.shuffle)
        loader = BatchLoader(
            config,
            state.flow,
            prepare,
            state.micro_batching,
            state.localization,
            stream,
            cached,
            state.reduction.host_waits,
        )
        self.loaders.append(loader)
        try:
            while state.progress.iteration < derived.train_iters(config):
                if self._closed:
                    raise MegatronWrapError("wrap.batches: the run is closed; begin another with wrap.initialize()")
                with phase(DATA):
                    state.offered = loader.next(state.progress.cursor, frozenset(state.progress.left_out))
                yield state.offered
        finally:
            loader.close()
            self.loaders.remove(loader)

    def close(self) -> None:
        """End the processes that prepare batches."""
        self._closed = True
        for loader in self.loaders:
            loader.close()

    def training_stream(self) -> SampleStream:
        """The training samples in an order that is a function of the seed.

        Raises:
            DataError: a file is missing or malformed.
        """
        config = self._config
        if derived.is_indexed(config.data):
            return self._indexed_data().training
        return training_stream(
            derived.training_sources(config),
            config.train.seed,
            config.data.shuffle,
            config.data.shuffle_buffer,
            derived.mock_samples(config.data),
        )

    def evaluation_sets(self) -> Mapping[str, Sequence[Any]]:
        """Name -> samples of each evaluation set.

        Raises:
            DataError: a file is missing or malformed.
        """
        config = self._config
        if derived.is_indexed(config.data):
            return self._indexed_data().evaluation
        return validation_sets(derived.validation_sources(config), skip_bad=config.data.on_bad_sample == "skip")

    def _indexed_data(self) -> IndexedData:
        if self._indexed is None:
            size = model_vocab_size(self._config.arch, self._tokenizer, self._config.model_provider.hf_path)
            self._indexed = open_indexed(self._config, size, self._tokenizer)
        return self._indexed


def with_train_iters(config: RunConfig, parallel: ParallelState, tokenizer: Any) -> RunConfig:
    """The configuration with `train_iters`, derived from `train_samples`, or from `train_epochs` and the training data.

    Raises:
        ConfigError: the phases of the learning rate do not fit the number of steps.
        DataError: a row cannot be used.
    """
    if config.train.train_samples is not None:
        return _with_steps(config, derived.train_iters(config))
    if config.train.train_epochs is None or config.train.train_iters is not None:
        return config
    size = model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path)
    flow = build_flow(config, tokenizer, size, parallel)
    rule = batch_rule(
        config, micro_batching_of(config, parallel, trained_shape(config, size), num_microbatches_multiple=1)
    )
    stream = RunData(config, tokenizer).training_stream()
    prepare = preparation(flow, sample_preparation(flow, config), config.train.seed)
    cached = None
    if rule.budget is not None:
        cached = cached_samples(config, derived.training_sources(config), stream, flow, prepare)
    reader = sample_reader(config, stream, prepare, rule.budget, cached)
    samples_per_epoch = stream.samples_per_epoch
    assert samples_per_epoch is not None, "train_epochs is refused for sources that stream"
    steps = steps_of_epochs(config.train.train_epochs, samples_per_epoch, rule, reader)
    epochs, samples = counted(config.train.train_epochs, "epoch"), counted(samples_per_epoch, "sample")
    logger.info_rank_0(f"{epochs} of {samples}: {counted(steps, 'step')}")
    with_steps = _with_steps(config, steps)
    check_schedule(with_steps)
    return with_steps


def _with_steps(config: RunConfig, train_iters: int) -> RunConfig:
    return replace(config, train=replace(config.train, train_iters=train_iters))
