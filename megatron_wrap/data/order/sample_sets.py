"""The samples of a run: the training set, one source or a mixture, and the evaluation sets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.order.stream import Mixture, SampleStream, ShuffledBlocks, ShuffledRows, largest_remainders
from megatron_wrap.data.sources.files import open_rows, stream_rows
from megatron_wrap.data.sources.formats import SourceRows, to_sample
from megatron_wrap.data.sources.json_files import JsonLines
from megatron_wrap.data.sources.rows import (
    BadSample,
    ChosenRows,
    JoinedRows,
    ListedRows,
    Rows,
    Sample,
    StreamOfRows,
    converted,
)
from megatron_wrap.errors import DataError, Mistakes

_LISTED = 5
"""Largest number of malformed rows of a file that are listed."""


class NumberedSamples(Sequence[dict[str, int]]):
    """`num_samples` samples that contain only their index, for flows that generate their own data."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: Any) -> Any:
        selected = range(self._num_samples)[index]
        return [{"index": row} for row in selected] if isinstance(selected, range) else {"index": selected}

    def where(self, index: int) -> str:
        """`mock:ROW`."""
        return f"mock:{index + 1}"


class SampleSet(Sequence[Any]):
    """A finite set of samples with indices and slices; `where` names a sample in messages."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        selected = range(len(self._rows))[index]
        return SampleSet(ChosenRows(self._rows, selected)) if isinstance(selected, range) else self._rows[selected]

    def where(self, index: int) -> str:
        """See `Rows`."""
        return self._rows.where(index)


def open_source(source: SourceConfig) -> SampleSet:
    """Random access to the samples of one source, in the form that the flows take.

    Raises:
        DataError: a file is missing, empty or cannot be read.
    """
    rows: Rows
    if source.streaming:
        rows = _first_of_stream(source)
    else:
        rows = open_rows(source)
        if len(rows) == 0:
            raise DataError(f"{source.path}: no samples; write one JSON object per line, or one row per sample")
    return SampleSet(SourceRows(rows, source))


def training_stream(
    sources: Sequence[SourceConfig],
    seed: int,
    shuffle: bool = True,
    shuffle_buffer: int = 1000,
    mock_samples: int | None = None,
) -> SampleStream:
    """The endless order of the training set.

    One source is read epoch by epoch, in the order of `EpochSampler` or, streaming, in blocks. An epoch of a mixture
    takes from each source its `samples`, `epochs` times its length, or (with weights) its share of all samples. If a
    source of the mixture streams, there are no epochs, and the weights hold in each `shuffle_buffer` samples.

    Args:
        sources: `derived.training_sources(config)`.
        seed: `megatron_lm.train.common.seed`.
        shuffle: False: keep the order of the files.
        shuffle_buffer: samples of a block of a streaming source.
        mock_samples: `derived.mock_samples(config.data)`; not None: that many numbered samples instead.

    Raises:
        DataError: there is no source; one is missing, empty or cannot be read; or its share is less than a sample.
    """
    if mock_samples is not None:
        return ShuffledRows(NumberedSamples(mock_samples), seed, shuffle)
    if not sources:
        raise DataError(
            "no training data; call wrap.batches(samples), or select megatron_wrap.data dataset and set its key train"
        )
    parts: list[SampleStream] = []
    for number, source in enumerate(sources):
        part = number + 1 if len(sources) > 1 else 0
        if source.streaming:
            convert = functools.partial(to_sample, source=source)
            parts.append(ShuffledBlocks(stream_rows(source), convert, seed, shuffle, shuffle_buffer, part))
        else:
            parts.append(ShuffledRows(open_source(source), seed, shuffle, part))
    if len(sources) == 1 and sources[0].samples is None and sources[0].epochs is None:
        return parts[0]
    return _mixture(sources, parts, seed, shuffle, shuffle_buffer)


def stream_of(samples: Sequence[Any], seed: int, shuffle: bool = True, name: str = "wrap.batches") -> SampleStream:
    """The endless order of a sequence that the caller passes; samples are not changed.

    Raises:
        DataError: it is empty.
    """
    return ShuffledRows(ListedRows(samples, name), seed, shuffle)


def first_training_samples(
    sources: Sequence[SourceConfig], mock_samples: int | None, count: int, skip_bad: bool = False
) -> list[tuple[str, Any]]:
    """`FILE:ROW` and sample of the first rows of the training set, at least one of each source and at most `count` if
    that is enough for them, without reading the rest of the files. Empty without a training set.

    Args:
        skip_bad: leave out rows that cannot be used.

    Raises:
        DataError: a source is missing, or one of these rows is malformed.
    """
    if mock_samples is not None:
        numbered = NumberedSamples(mock_samples)
        return [(numbered.where(row), sample) for row, sample in enumerate(numbered[:count])]
    samples: list[tuple[str, Any]] = []
    for number, source in enumerate(sources):
        share = -(-(count - len(samples)) // (len(sources) - number))
        samples += _head(source, max(1, share), skip_bad)
    return samples


def each_row(source: SourceConfig, limit: int | None = None) -> Iterator[tuple[str, Sample | BadSample]]:
    """`FILE:ROW` and sample (of a bad row its BadSample) of each row of a source, in the order of its files, without an
    index of them where possible.

    Args:
        limit: number of the first rows; None: all.

    Raises:
        DataError: the source is missing or cannot be read.
    """
    in_order = source.streaming or (source.kind in ("file", "glob") and source.split is None)
    rows = stream_rows(source) if in_order else StreamOfRows(open_rows(source))
    convert = functools.partial(to_sample, source=source)
    for where, row in islice(rows.start_at(0), limit):
        try:
            yield where, converted(convert, row, functools.partial(str, where))
        except BadSample as error:
            yield where, error


def check_source(source: SourceConfig, every_row: bool) -> int | None:
    """Open a source, and parse each row of JSON lines; returns the number of rows, None of a stream.

    Raises:
        DataError: it is missing, empty or cannot be read; with `every_row` also a malformed row, and the next ones in
            its `further`.
    """
    if source.streaming:
        if not _head(source, 1, skip_bad=not every_row):
            raise DataError(f"{source.path}: no samples")
        return None
    samples = open_source(source)
    is_json = source.kind == "file" and isinstance(open_rows(source), JsonLines)
    mistakes = Mistakes()
    for row in range(len(samples)) if is_json and every_row else ():
        try:
            samples[row]
        except BadSample as error:
            mistakes.add(error)
            if len(mistakes) == _LISTED:
                break
    mistakes.raise_first()
    return len(samples)


def validation_sets(sets: Mapping[str, Sequence[SourceConfig]], skip_bad: bool = False) -> dict[str, SampleSet]:
    """Name -> evaluation set: finite, with `len`, indices and slices, and `where(index)` for messages. Several
    sources of a set are concatenated.

    Args:
        sets: `derived.validation_sources(config)`.
        skip_bad: leave out rows that cannot be used, for which every row is read once.

    Raises:
        DataError: a source is missing, empty or cannot be read.
    """
    return {name: _evaluation_set(sources, skip_bad) for name, sources in sets.items()}


def _mixture(
    sources: Sequence[SourceConfig], parts: Sequence[SampleStream], seed: int, shuffle: bool, block: int
) -> Mixture:
    streaming = any(source.streaming for source in sources)
    counts = epoch_counts(sources, [part.samples_per_epoch or 0 for part in parts], block)
    for source, count in zip(sources, counts, strict=True):
        if count == 0:
            total = block if streaming else sum(part.samples_per_epoch or 0 for part in parts)
            unit = f"the {total} of shuffle_buffer" if streaming else f"the {total} of an epoch"
            raise DataError(f"{source.name}: its share is less than one sample of {unit}; raise its share")
    return Mixture(parts, counts, seed, shuffle, is_epoch=not streaming)


def epoch_counts(sources: Sequence[SourceConfig], lengths: Sequence[int], block: int) -> list[int]:
    """Samples of each source in an epoch of their mixture; where one streams, in `block` samples.

    Args:
        lengths: samples of each source; 0 of one that streams.

    Raises:
        DataError: one streams, and not all have a weight.
    """
    weights = [source.weight for source in sources if source.weight is not None]
    weighted = len(weights) == len(sources)
    if any(source.streaming for source in sources):
        if not weighted:
            raise DataError("a mixture with a streaming source needs a weight of each source")
        return largest_remainders(weights, block)
    if weighted:
        return [round(sum(lengths) * weight / sum(weights)) for weight in weights]
    shares = zip(sources, lengths, strict=True)
    return [source.samples or round((source.epochs or 1) * length) for source, length in shares]


def _head(source: SourceConfig, count: int, skip_bad: bool) -> list[tuple[str, Sample]]:
    """`FILE:ROW` and sample of the first rows in the order of the files."""
    samples: list[tuple[str, Sample]] = []
    for where, sample in each_row(source):
        if not isinstance(sample, BadSample):
            samples.append((where, sample))
        elif not skip_bad:
            raise sample
        if len(samples) == count:
            break
    return samples


def _first_of_stream(source: SourceConfig) -> Rows:
    """The first `samples` rows of a streaming source, in memory."""
    if source.samples is None:
        raise DataError(f"{source.path}: streams, so it has no end; give samples, or delete streaming")
    return _StreamedRows(list(islice(stream_rows(source).start_at(0), source.samples)))


class _StreamedRows:
    """Rows of a stream in memory, with their `FILE:ROW`. See `Rows`."""

    def __init__(self, rows: Sequence[tuple[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index][1]

    def where(self, index: int) -> str:
        return self._rows[index][0]


def _evaluation_set(sources: Sequence[SourceConfig], skip_bad: bool) -> SampleSet:
    parts: list[Rows] = []
    for source in sources:
        samples = open_source(source)
        parts.append(ChosenRows(samples, range(len(samples))[: source.samples]))
    whole = parts[0] if len(parts) == 1 else JoinedRows(parts)
    if skip_bad:
        whole = ChosenRows(whole, [index for index in range(len(whole)) if _is_good(whole, index)])
    return SampleSet(whole)


def _is_good(rows: Rows, index: int) -> bool:
    with contextlib.suppress(BadSample):
        rows[index]
        return True
    return False
