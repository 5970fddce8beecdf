"""The samples of a run: the training set and the evaluation sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.config.sources import SourceConfig
from megatron_wrap.data.jsonl import JsonLines
from megatron_wrap.data.rows import Rows
from megatron_wrap.data.stream import SampleStream, ShuffledRows
from megatron_wrap.errors import DataError


class NumberedSamples(Sequence[dict[str, int]]):
    """`num_samples` samples that contain only their index, for flows that generate their own data."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: Any) -> Any:
        places = range(self._num_samples)[index]
        return [{"index": place} for place in places] if isinstance(places, range) else {"index": places}

    def where(self, index: int) -> str:
        """`mock:ROW`."""
        return f"mock:{index + 1}"


class OwnSamples:
    """A sequence that the caller passes, with places for messages: `sample 17 of wrap.batches`."""

    def __init__(self, samples: Sequence[Any], name: str) -> None:
        self._samples, self._name = samples, name

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]

    def where(self, index: int) -> str:
        """See `Rows`; the sequence's own `where`, if it has one."""
        own = getattr(self._samples, "where", None)
        return str(own(index)) if callable(own) else f"{self._name}:{index + 1}"


def open_source(source: SourceConfig) -> Rows:
    """Random access to the samples of one source, in the form that the flows take (see `rows.Rows`).

    Raises:
        DataError: the source is missing or cannot be read.
    """
    return JsonLines(source.path)


def training_stream(
    sources: Sequence[SourceConfig],
    seed: int,
    shuffle: bool = True,
    shuffle_buffer: int = 1000,
    mock_samples: int | None = None,
) -> SampleStream:
    """The endless order of the training set, from one source or a mixture.

    Args:
        sources: `derived.training_sources(config)`.
        seed: `megatron_lm.train.common.seed`.
        shuffle: false: the order of the files.
        shuffle_buffer: samples of a block of a streaming source.
        mock_samples: `derived.mock_samples(config.data)`; not None: that many numbered samples instead.

    Raises:
        DataError: there is no source, or one is missing, empty or cannot be read.
    """
    return ShuffledRows(training_samples(sources, mock_samples), seed, shuffle)  # type: ignore[arg-type]


def stream_of(samples: Sequence[Any], seed: int, shuffle: bool = True, name: str = "wrap.batches") -> SampleStream:
    """The endless order of a sequence that the caller passes."""
    return ShuffledRows(OwnSamples(samples, name), seed, shuffle)


def training_samples(sources: Sequence[SourceConfig], mock_samples: int | None = None) -> Sequence[Any]:
    """The training set.

    Raises:
        DataError: there is no source.
    """
    if mock_samples is not None:
        return NumberedSamples(mock_samples)
    if not sources:
        raise DataError(
            "no training data; call wrap.batches(samples), or select megatron_wrap.data dataset and set its key train"
        )
    return open_source(sources[0])  # type: ignore[return-value]


def first_training_samples(sources: Sequence[SourceConfig], mock_samples: int | None, count: int) -> list[Any]:
    """The first `count` samples of the training set (or all, if fewer), without reading the rest of the files; empty if
    there is no training set."""
    if mock_samples is not None:
        return list(NumberedSamples(mock_samples)[:count])
    return [] if not sources else JsonLines(sources[0].path).head(count)


def check_source(source: SourceConfig, every_row: bool) -> None:
    """Open a source, and parse each of its lines where that needs no tokenizer and no conversion.

    Raises:
        DataError: it is missing, empty or cannot be read; with `every_row` also a malformed line of JSON lines.
    """
    JsonLines(source.path).check()


def validation_sets(sets: Mapping[str, Sequence[SourceConfig]]) -> dict[str, Sequence[Any]]:
    """Name -> evaluation set: finite, with `len`, indices and slices, and `where(index)` for messages.

    Args:
        sets: `derived.validation_sources(config)`.
    """
    return {name: open_source(sources[0]) for name, sources in sets.items()}  # type: ignore[misc]
