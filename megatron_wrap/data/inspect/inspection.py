"""Shows the data that a run is trained on, sample by sample: tokens with a loss, truncated tokens, and the usual
mistakes."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.chat.encode import ChatTokens, truncate
from megatron_wrap.data.inspect.mistakes import MISTAKES, Checks, Kind, Tokens
from megatron_wrap.data.order.bin_packing import fewest_bins
from megatron_wrap.data.order.sample_sets import NumberedSamples, epoch_counts, open_source
from megatron_wrap.data.sources.formats import sample_weight
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.nearest_names import did_you_mean
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


@dataclass(frozen=True)
class Inspected:
    """One sample that the run accepts."""

    where: Callable[[], str]
    """Function that returns the origin of the sample, see `ReadSample`."""
    source: str
    sequences: tuple[Tokens, ...]
    weight: float
    mistakes: tuple[str, ...]
    """Mistakes of the sample, as keys of `MISTAKES`."""

    @property
    def length(self) -> int:
        """Tokens that the model reads, over all sequences."""
        return sum(tokens.length for tokens in self.sequences)


@dataclass
class Finding:
    """One kind of mistake: how many samples have it, and the first ones."""

    key: str
    count: int = 0
    rows: list[str] = field(default_factory=list)
    """`FILE:ROW` of the first samples, with the reason where it differs between them."""

    def add(self, row: Callable[[], str], most: int = 5) -> bool:
        """Count one more sample; returns whether it is one of the first, which are listed."""
        self.count += 1
        if self.count <= most:
            self.rows.append(row())
        return self.count <= most


@dataclass
class Counts:
    """Sums over the samples of a source, or of all."""

    samples: int = 0
    sequences: int = 0
    trained: int = 0
    other: int = 0
    cut: int = 0
    truncated: int = 0
    dropped: int = 0

    def add(self, sample: Inspected) -> None:
        """Count an accepted sample."""
        self.samples += 1
        self.sequences += len(sample.sequences)
        self.trained += sum(tokens.count("trained") for tokens in sample.sequences)
        self.other += sum(tokens.count("other") for tokens in sample.sequences)
        self.cut += sum(tokens.count("cut") for tokens in sample.sequences)
        self.truncated += "truncated" in sample.mistakes


@dataclass
class Inspection:
    """The result over all samples that were read."""

    seq_length: int
    counts: Counts = field(default_factory=Counts)
    by_source: dict[str, Counts] = field(default_factory=dict)
    lengths: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens that the model reads of each sequence of each sample, after truncation."""
    whole_lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence before truncation."""
    findings: dict[str, Finding] = field(default_factory=dict)
    shown: list[Inspected] = field(default_factory=list)
    """The first samples, and the first ones of each mistake."""

    def efficiencies(self, micro_batch_size: int) -> dict[str, float]:
        """Share of real tokens among those that the model computes: padded to `seq_length`, padded to the longest
        sequence of each micro-batch in this order, and packed to `seq_length` (best fit over these samples)."""
        if not self.lengths:
            return {}
        real = sum(sum(lengths) for lengths in self.lengths)
        sizes = [max(1, sum(lengths)) for lengths in self.lengths]
        capacity = max(self.seq_length, *sizes)
        parts = [self.lengths[begin : begin + micro_batch_size] for begin in range(0, len(sizes), micro_batch_size)]
        rows = [[max(1, length) for sample in part for length in sample] for part in parts]
        return {
            "padded to seq_length": real / (self.counts.sequences * self.seq_length),
            "padded to the longest of a micro-batch": real / sum(len(row) * max(row) for row in rows),
            "packed": real / (len(fewest_bins(sizes, capacity)) * capacity),
        }


Encode = Callable[[Any], Sequence[Tokens]]
"""The sequences of a sample; DataError if the run cannot use it."""


def inspect(
    samples: Iterable[ReadSample],
    encode: Encode,
    checks: Checks,
    seq_length: int,
    show: int,
    max_lengths: Mapping[str, int] | None = None,
) -> Inspection:
    """Encode each sample, count its tokens and look for mistakes.

    Args:
        encode: from a sample to its sequences.
        checks: the mistakes to look for.
        seq_length: of the run, in tokens.
        show: how many of the first samples to keep for display.
        max_lengths: source -> tokens above which its samples are left out.

    Raises:
        DataError: no sample can be used; the message is that of the first one.
    """
    result = Inspection(seq_length)
    first_of: dict[bytes, Callable[[], str]] = {}
    refused = ""
    for where, source, sample in samples:
        counts = (result.counts, result.by_source.setdefault(source, Counts()))
        try:
            if isinstance(sample, DataError):
                raise sample
            sequences = tuple(encode(sample))
        except DataError as error:
            reason = functools.partial(_reason, where, str(error))
            refused = refused or reason()
            _drop(result, "refused", reason, counts)
            continue
        longest = (max_lengths or {}).get(source)
        if longest is not None and any(len(tokens.input_ids) > longest for tokens in sequences):
            _drop(result, "too_long", where, counts)
            continue
        digest = _digest(sequences)
        mistakes = checks.of(sample, sequences) + (("duplicate",) if digest in first_of else ())
        inspected = Inspected(
            where, source, sequences, sample_weight(sample) if isinstance(sample, Mapping) else 1.0, mistakes
        )
        listed = [_find(result, key, where, first_of.get(digest)) for key in mistakes]
        first_of.setdefault(digest, where)
        for each in counts:
            each.add(inspected)
        result.lengths.append(tuple(tokens.length for tokens in sequences))
        result.whole_lengths += [len(tokens.input_ids) for tokens in sequences]
        if result.counts.samples <= show or (show and any(listed)):
            result.shown.append(inspected)
    if refused and result.counts.samples == 0:
        raise DataError(refused)
    return result


def tokens_of(tokens: ChatTokens, seq_length: int, rule: str) -> Tokens:
    """The kinds of a sequence's tokens after truncation to the `seq_length` + 1 that a micro-batch takes.

    Raises:
        DataError: it is too long, and the rule is "refuse".
    """
    kept, was_cut = truncate(tokens, seq_length + 1, rule)
    begin = len(tokens) - len(kept) if was_cut and rule == "left" else 0
    end = begin + len(kept)
    kinds: list[Kind] = []
    for position, mask in enumerate(tokens.loss_mask):
        if not begin <= position < end:
            kinds.append("cut")
        else:
            kinds.append("trained" if mask and tokens.weight > 0 and position > begin else "other")
    return Tokens(list(tokens.input_ids), kinds, max(0, len(kept) - 1))


def tokens_of_row(ids: list[int], mask: list[float], labels: list[int] | None, length: int) -> Tokens:
    """The first `length` tokens of a collated row, and the last label: the loss of a position is that of the next
    token."""
    ids, mask = ids[:length], mask[:length]
    if labels is not None and length:
        ids, mask = [*ids, labels[length - 1]], [0, *mask]
    return Tokens(ids, ["trained" if value else "other" for value in mask], length)


def segments(tokenizer: Any, tokens: Tokens) -> list[tuple[str, Kind]]:
    """The text of each run of tokens of one kind; the ids where there is no tokenizer."""
    texts: list[tuple[str, Kind]] = []
    end = 0
    for kind, run in groupby(tokens.kinds):
        begin, end = end, end + sum(1 for _ in run)
        texts.append((_text(tokenizer, tokens.input_ids, begin, end), kind))
    return texts


def _text(tokenizer: Any, ids: Sequence[int], begin: int, end: int) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids[begin:end])) + " "
    # decoded after the preceding tokens: decoders drop the space of the first token
    before = list(ids[max(0, begin - 4) : begin])
    settings: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    head = tokenizer.decode(before, **settings)
    both = str(tokenizer.decode([*before, *ids[begin:end]], **settings))
    return both[len(head) :] if both.startswith(head) else str(tokenizer.decode(list(ids[begin:end]), **settings))


def histogram(lengths: Sequence[int], bins: int = 40) -> tuple[int, list[int]]:
    """(width of a bin, count in each bin): bin i has the lengths from i * width to (i + 1) * width - 1."""
    width = max(1, -(-(max(lengths, default=0) + 1) // bins))
    counts = Counter(length // width for length in lengths)
    return width, [counts[number] for number in range(max(counts, default=0) + 1)]


def _reason(where: Callable[[], str], message: str) -> str:
    """The message after `FILE:ROW`, with which messages of readers already begin."""
    row = where()
    return message if message.startswith(row) else f"{row}: {message}"


def _drop(result: Inspection, key: str, row: Callable[[], str], counts: Sequence[Counts]) -> None:
    """Count a sample that the run leaves out."""
    result.findings.setdefault(key, Finding(key)).add(row)
    for each in counts:
        each.dropped += 1


def _find(result: Inspection, key: str, where: Callable[[], str], first: Callable[[], str] | None) -> bool:
    """Count a mistake of a sample that the run uses; returns whether its row is listed."""
    row = (lambda: f"{where()} is {first()}") if key == "duplicate" and first is not None else where
    return result.findings.setdefault(key, Finding(key)).add(row)


def _digest(sequences: Sequence[Tokens]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tokens in sequences:
        digest.update(array("q", tokens.input_ids).tobytes())
        digest.update("".join(kind[0] for kind in tokens.kinds).encode())
        digest.update(b"|")
    return digest.digest()


def ordered(findings: Mapping[str, Finding]) -> list[Finding]:
    """The findings in the order of `MISTAKES`, the most serious first."""
    return [findings[key] for key in MISTAKES if key in findings]
