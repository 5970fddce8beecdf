"""Methods of `MegatronWrap` that read the training data: batches, and the length of a run that is given in epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import derived

if TYPE_CHECKING:
    from megatron_wrap.config import RunConfig
    from megatron_wrap.engine.loader import BatchLoader
    from megatron_wrap.engine.state import TrainingState


class LoadingVerbs:
    """Mixin of `MegatronWrap`, which defines the attributes declared here."""

    config: RunConfig
    _loaders: list[BatchLoader]

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
        from megatron_wrap.data.sources import stream_of, training_stream
        from megatron_wrap.engine.loader import BatchLoader

        state, data, seed = self._ready(), self.config.data, self.config.train.seed
        if samples is None:
            stream = training_stream(
                derived.training_sources(self.config),
                seed,
                data.shuffle,
                data.shuffle_buffer,
                derived.mock_samples(data),
            )
        else:
            stream = stream_of(samples, seed, data.shuffle)
        loader = BatchLoader(state, stream)
        self._loaders.append(loader)
        try:
            while self._ready().progress.iteration < self.train_iters:
                state.offered = loader.next(state.progress)
                yield state.offered
        finally:
            loader.close()
            if loader in self._loaders:
                self._loaders.remove(loader)

    def _close_loaders(self) -> None:
        while self._loaders:
            self._loaders.pop().close()
