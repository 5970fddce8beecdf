"""Methods of `MegatronWrap` that read the training data: batches, and the length of a run that is given in epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import derived
from megatron_wrap.config.train_checks import check_schedule
from megatron_wrap.metrics.phases import DATA, phase
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from megatron_wrap.config import RunConfig
    from megatron_wrap.data.indexed import IndexedData
    from megatron_wrap.data.stream import SampleStream
    from megatron_wrap.engine.loader import BatchLoader
    from megatron_wrap.engine.state import TrainingState
    from megatron_wrap.engine.tokenized import CachedSamples
    from megatron_wrap.flow import MegatronWrapTrainingFlowBase
    from megatron_wrap.parallel.state import ParallelState


class LoadingVerbs:
    """Mixin of `MegatronWrap`, which defines the attributes declared here."""

    config: RunConfig
    tokenizer: Any
    _loaders: list[BatchLoader]
    _indexed: IndexedData | None

    if TYPE_CHECKING:

        @property
        def train_iters(self) -> int:
            """See `MegatronWrap`."""

        def _ready(self) -> TrainingState: ...

    def batches(self, samples: Sequence[Any] | None = None) -> Iterator[list[Any]]:
        """The remaining global batches of the run, in an order that is a function of the seed.

        Each is a list of samples as they were read, and carries this replica's micro-batches, which worker processes
        prepare ahead (`megatron_wrap.data.num_workers`). A resumed run continues with the very next sample. Every rank
        yields the same batches; with `megatron_lm.train.common.global_batch_tokens` their lengths vary.

        Args:
            samples: the training set; default: that of `megatron_wrap.data`. Workers have a copy from the first batch.

        Raises:
            DataError: a row cannot be used; the message begins with its file and row.
            TrainingError: a worker process has died.
        """
        from megatron_wrap.data.sources import stream_of
        from megatron_wrap.engine.loader import BatchLoader

        state = self._ready()
        if samples is None:
            stream = self._training_stream()
            loader = BatchLoader(state, stream, self._cached_samples(stream, state.flow))
        else:
            loader = BatchLoader(state, stream_of(samples, self.config.train.seed, self.config.data.shuffle))
        self._loaders.append(loader)
        try:
            while self._ready().progress.iteration < self.train_iters:
                with phase(DATA):
                    state.offered = loader.next(state.progress)
                yield state.offered
        finally:
            loader.close()
            if loader in self._loaders:
                self._loaders.remove(loader)

    def _training_stream(self) -> SampleStream:
        from megatron_wrap.data.sources import training_stream

        if derived.is_indexed(self.config.data):
            return self._indexed_data().training
        data, sources = self.config.data, derived.training_sources(self.config)
        mock_samples = derived.mock_samples(data)
        return training_stream(sources, self.config.train.seed, data.shuffle, data.shuffle_buffer, mock_samples)

    def _evaluation_sets(self) -> Mapping[str, Sequence[Any]]:
        """The evaluation sets of `megatron_wrap.data`."""
        from megatron_wrap.data.sources import validation_sets

        if derived.is_indexed(self.config.data):
            return self._indexed_data().evaluation
        skip_bad = self.config.data.on_bad_sample == "skip"
        return validation_sets(derived.validation_sources(self.config), skip_bad)

    def _indexed_data(self) -> IndexedData:
        from megatron_wrap.data.indexed import open_indexed
        from megatron_wrap.engine.build import resolve_vocab_size

        if self._indexed is None:
            vocab_size = resolve_vocab_size(self.config, self.tokenizer)
            self._indexed = open_indexed(self.config, vocab_size, self.tokenizer)
        return self._indexed

    def _cached_samples(self, stream: SampleStream, flow: MegatronWrapTrainingFlowBase) -> CachedSamples | None:
        from megatron_wrap.engine.loader import preparation
        from megatron_wrap.engine.tokenized import cached_samples

        sources = derived.training_sources(self.config)
        return cached_samples(self.config, sources, stream, flow, preparation(flow, self.config.train.seed))

    def _with_counted_steps(self, parallel: ParallelState) -> RunConfig:
        """The configuration with `train_iters`, from `train_samples`, or from `train_epochs` and the training data."""
        config = self.config
        if config.train.train_samples is not None:
            return replace(config, train=replace(config.train, train_iters=derived.train_iters(config)))
        if config.train.train_epochs is None or config.train.train_iters is not None:
            return config
        from megatron_wrap.engine.build import build_flow, model_shape, resolve_vocab_size
        from megatron_wrap.engine.cut import batch_cut
        from megatron_wrap.engine.epochs import steps_of_epochs
        from megatron_wrap.engine.loader import batch_rule, sample_reader

        vocab_size = resolve_vocab_size(config, self.tokenizer)
        flow = build_flow(config, parallel, self.tokenizer, vocab_size)
        rule = batch_rule(config, batch_cut(config, parallel, model_shape(config, vocab_size), rounds=1))
        stream = self._training_stream()
        stored = None if rule.budget is None else self._cached_samples(stream, flow)
        reader = sample_reader(config, stream, flow, rule.budget, stored)
        size = stream.samples_per_epoch
        assert size is not None, "train_epochs is refused for sources that stream"
        steps = steps_of_epochs(config.train.train_epochs, size, rule, reader)
        logger.info_rank_0(f"{config.train.train_epochs:g} epochs of {size:,} samples are {steps:,} steps")
        counted = replace(config, train=replace(config.train, train_iters=steps))
        check_schedule(counted)
        return counted

    def _close_loaders(self) -> None:
        while self._loaders:
            self._loaders.pop().close()
