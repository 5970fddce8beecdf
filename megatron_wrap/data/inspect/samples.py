"""Reads the samples of a run that are inspected: those of one set, evenly spaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.order.sample_sets import NumberedSamples, epoch_counts, open_source
from megatron_wrap.errors import ConfigError, DataError, did_you_mean
from megatron_wrap.platform import choose_platform

_OF_STREAM = 10_000
"""Number of samples that are read from a source without an end."""


class ReadSample(NamedTuple):
    """A sample, or the DataError of a row that cannot be used."""

    where: Callable[[], str]
    """Function that returns `FILE:ROW`; counting the lines before the row may read the file."""
    source: str
    sample: Any


@dataclass(frozen=True)
class SampleSelection:
    """The samples of a set that are read, in the order of the files."""

    samples: Iterator[ReadSample]
    total: int | None
    """Number of samples of the set; None: a source streams."""
    max_lengths: Mapping[str, int]
    """Source -> tokens above which its samples are left out."""
    epoch_shares: Mapping[str, float] = field(default_factory=dict)
    """Source -> its share of the samples of an epoch, after weights and numbers of epochs; of training data."""


def select_samples(config: RunConfig, split: str, tokenizer: Any, limit: int) -> SampleSelection:
    """Open a set of a run, and select at most `limit` of its samples (0: all).

    Args:
        split: "train", or the name of an evaluation set.
        tokenizer: of the run; or None.

    Raises:
        ConfigError: there is no such set. DataError: the run has no training data, or it cannot be read.
    """
    if derived.is_indexed(config.data):
        choose_platform(config.init.platform).install()  # Megatron-Core's modules are imported for it
        from megatron_wrap.data.indexed.windows import open_indexed

        data = open_indexed(config, model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path), tokenizer)
        windows = _named({"train": data.training.windows, **data.evaluation}, split)
        return SampleSelection(_spaced([(split, windows)], limit), len(windows), {})
    training = derived.training_sources(config)
    sources = _named({"train": training, **derived.validation_sources(config)}, split)
    mock_samples = derived.mock_samples(config.data) if split == "train" else None
    if not sources and mock_samples is None:
        raise DataError(
            "the run has no training data, because its caller passes samples; give megatron_wrap.data.train=FILE"
        )
    block = config.data.shuffle_buffer if split == "train" else None
    return select_from(sources, mock_samples, limit, block)


def select_from(
    sources: Sequence[SourceConfig], mock_samples: int | None, limit: int, block: int | None = None
) -> SampleSelection:
    """Select at most `limit` samples (0: all) of these sources, evenly spaced; of a streaming source the first ones.

    Args:
        mock_samples: not None: this many numbered samples instead.
        block: `shuffle_buffer` of a mixture that the run trains on; None: the sources are no mixture.
    """
    opened: list[tuple[str, Any]] = [("mock", NumberedSamples(mock_samples))] if mock_samples is not None else []
    streaming, most = any(source.streaming for source in sources), limit or _OF_STREAM
    for source in sources if not opened else ():
        bound = replace(source, samples=min(source.samples or most, most)) if source.streaming else source
        opened.append((source.name, open_source(bound)))
    total = None if streaming else sum(len(samples) for _, samples in opened)
    max_lengths = {source.name: source.max_length for source in sources if source.max_length is not None}
    shares: dict[str, float] = {}
    if block is not None and len(sources) > 1 and mock_samples is None:
        lengths = [
            0 if source.streaming else len(samples) for source, (_, samples) in zip(sources, opened, strict=True)
        ]
        counts = epoch_counts(sources, lengths, block)
        shares = {source.name: count / sum(counts) for source, count in zip(sources, counts, strict=True)}
    return SampleSelection(_spaced(opened, limit), total, max_lengths, shares)


def _named(sets: Mapping[str, Any], split: str) -> Any:
    if split not in sets:
        raise ConfigError(f"--split {split}: the run has {', '.join(sets)}{did_you_mean(split, list(sets)[1:])}")
    return sets[split]


def _spaced(opened: Sequence[tuple[str, Any]], limit: int) -> Iterator[ReadSample]:
    """At most `limit` samples of all sets (0: all), each with its name, evenly spaced."""
    total = sum(len(samples) for _, samples in opened)
    step = max(1.0, total / limit) if limit else 1.0
    begin = 0
    for name, samples in opened:
        number = -(-begin // step)
        while round(number * step) < begin + len(samples):
            index = max(0, int(number * step) - begin)
            number += 1
            try:
                sample = samples[index]
            except DataError as error:
                sample = error
            yield ReadSample(functools.partial(samples.where, index), name, sample)
        begin += len(samples)
