"""Validation of the data, from its files to the first rows as the flow renders them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.vocabulary import model_vocab_size, small_tokenizer
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.core.validation.candidate import Candidate, Note
from megatron_wrap.core.validation.setup import new_tokens_warning
from megatron_wrap.data.chat.encode import are_equal_answers
from megatron_wrap.data.sources.rows import converted
from megatron_wrap.errors import DataError, Mistakes
from megatron_wrap.metrics.number_format import counted

if TYPE_CHECKING:
    from megatron_wrap.flow import MegatronWrapTrainingFlowBase

_FIRST_ROWS = 16
"""Number of first rows of each source that are rendered."""
_LISTED = 3
"""Largest number of rows of each source that are listed with their mistake."""
_LOOK = "megatron-wrap inspect-data shows which tokens of the data are trained: look for answers, or for truncation"


def check_data(candidate: Candidate) -> Iterator[Note]:
    """Open every file that the configuration names, and parse every line of JSON lines unless bad rows are skipped.

    Raises:
        DataError: a missing file or a malformed line; the message contains its number.
    """
    config, data = candidate.config, candidate.config.data
    if derived.is_indexed(data):
        yield from _indexed(candidate)
    elif not derived.has_sources(data):
        mock = derived.mock_samples(data) is not None
        yield Note("mock data" if mock else "no files: the training script passes the samples")
    mistakes = Mistakes()
    for source in _sources(config):
        if not _is_local(source):
            where = "is downloaded" if source.kind == "hub" else "is called"
            yield Note(f"{source.path} {where} when training starts; megatron-wrap inspect-data reads it")
        elif source.kind == "file" and not Path(source.path).expanduser().is_file():
            candidate.unreadable.add(source.path)  # `check_data_files` reports it
        else:
            with mistakes.collected():
                yield Note(f"{source.path}{_rows_of(candidate, source)}")
    mistakes.raise_first()


def check_lengths(config: RunConfig) -> None:
    """Tokenize every sample if the flow refuses to truncate, so that no sample ends the run hours later.

    Raises:
        DataError: a sample is longer than the context; the message contains its file and line.
    """
    refuses = config.flow.options.get("truncation") == "refuse" and config.data.on_bad_sample == "error"
    if not derived.has_sources(config.data) or not refuses:
        return
    from megatron_wrap.data.chat.tokenizer import run_tokenizer
    from megatron_wrap.data.order.sample_sets import open_source
    from megatron_wrap.setup.flow import build_flow

    tokenizer = run_tokenizer(config.data)
    flow = build_flow(config, tokenizer, model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path))
    for source in _sources(config):
        if source.streaming or not _is_local(source):
            continue
        rows = open_source(source)
        for index in range(len(rows)):
            converted(flow.prepare_sample, rows[index], functools.partial(rows.where, index))


def check_first_rows(candidate: Candidate) -> Iterator[Note]:
    """Render the first rows of each source as the flow does, and collate two micro-batches of them.

    Raises:
        DataError: a row cannot be used; the message begins with its file and row. FlowError: the flow breaks its
            contract. ConfigError: stored outputs of the reference model belong to another run.
    """
    config = candidate.config
    if not is_known_flow(candidate):
        yield Note(f"not rendered: the script registers the flow {config.flow.flow_key}")
        return
    from megatron_wrap.data.order.sample_sets import NumberedSamples
    from megatron_wrap.engine.batches.collation import try_flow
    from megatron_wrap.setup.flow import build_flow, sample_preparation

    flow = build_flow(config, candidate.tokenizer, candidate.vocab_size, reference=candidate.reference)
    of_training = sample_preparation(flow, config)
    mock_samples = derived.mock_samples(config.data)
    mock = [] if mock_samples is None else NumberedSamples(mock_samples)[:2]
    first = [(f"mock:{number}", of_training(sample)) for number, sample in enumerate(mock, 1)]
    training = {source.path for source in derived.training_sources(config)}
    mistakes, num_rows, num_untrained = Mistakes(), 0, 0
    for source in _sources(config):
        if source.kind == "hub":
            continue
        # `check_data` reports a source that cannot be opened
        reported: tuple[type[DataError], ...] = (DataError,) if source.path in candidate.unreadable else ()
        with mistakes.collected(), contextlib.suppress(*reported):
            prepare = of_training if source.path in training else flow.prepare_sample
            prepared, lengths, untrained, bad = _rendered(candidate, source, flow, prepare)
            if source.path in training:
                first += prepared
                num_rows, num_untrained = num_rows + len(prepared), num_untrained + untrained
            for mistake in bad[:_LISTED] if config.data.on_bad_sample == "error" else ():
                mistakes.add(mistake)
            yield from _describe(candidate, source, lengths, bad)
            yield from _describe_losses(source, [sample for _, sample in prepared], untrained)
    yield from (Note(warning, is_warning=True) for warning in dropped_by_template(config, candidate.tokenizer))
    with mistakes.collected():
        try_flow(flow, first, config.train.seed)
    if 0 < num_rows == num_untrained:
        mistakes.add(DataError(f"none of the first {counted(num_rows, 'row')} has a trained token; {_LOOK}"))
    mistakes.raise_first()


def data_warnings(config: RunConfig, tokenizer: Any, vocab_size: int) -> Iterator[str]:
    """Warnings of a run before its first step: a tokenizer much smaller than the model's vocabulary, tokens that are
    new to the weights, and parts of messages that the chat template drops. Reads files only."""
    yield from filter(
        None, [small_tokenizer(config.arch, tokenizer), new_tokens_warning(config, tokenizer, vocab_size)]
    )
    yield from dropped_by_template(config, tokenizer)


def dropped_by_template(config: RunConfig, tokenizer: Any) -> Iterator[str]:
    """A warning for each source whose first rows have messages that the chat template renders without tool_calls, tools
    or content. Reads files only."""
    from megatron_wrap.data.inspect.mistakes import PARTS, dropped_parts
    from megatron_wrap.data.order.sample_sets import each_row

    if tokenizer is None:
        return
    for source in filter(_is_local, _sources(config)):
        dropped: Counter[str] = Counter()
        read = 0
        with contextlib.suppress(DataError):  # reported where the source is opened
            for _, row in each_row(source, _FIRST_ROWS):
                read += 1
                dropped.update(() if isinstance(row, DataError) else dropped_parts(tokenizer, row))
        if dropped:
            parts = ", ".join(f"{PARTS[part]} in {number}" for part, number in dropped.items())
            yield (
                f"{source.path}: the chat template drops, of the first {counted(read, 'row')}, {parts}; the model "
                "never sees them: use a tokenizer whose template (chat_template.jinja) renders them"
            )


def _rendered(
    candidate: Candidate,
    source: SourceConfig,
    flow: MegatronWrapTrainingFlowBase,
    prepare: Callable[[Any], Any],
) -> tuple[list[tuple[str, Any]], list[int], int, list[DataError]]:
    """The prepared first rows of a source with their names, the tokens of each, collated alone, the number of rows
    without a trained token, and why other rows cannot be used, except what `check_data` reports."""
    from megatron_wrap.data.order.sample_sets import each_row
    from megatron_wrap.engine.batches.collation import collate

    prepared: list[tuple[str, Any]] = []
    lengths: list[int] = []
    untrained = 0
    bad: list[DataError] = []
    seed = candidate.config.train.seed
    for where, row in each_row(source, _FIRST_ROWS):
        if isinstance(row, DataError):
            bad += [] if source.path in candidate.unreadable else [row]
            continue
        name = functools.partial(str, where)
        try:
            sample = converted(prepare, row, name)
            batch = converted(lambda sample: collate(flow, [sample], seed), sample, name)
            lengths.append(int(batch.lengths.sum()))
            untrained += not batch.is_trained
            prepared.append((where, sample))
        except DataError as mistake:
            bad.append(mistake)
    return prepared, lengths, untrained, bad


def _describe(
    candidate: Candidate,
    source: SourceConfig,
    lengths: Sequence[int],
    bad: Sequence[DataError],
) -> Iterator[Note]:
    """Notes about the first rows of a source; `lengths` are the tokens of the rows that can be used."""
    if candidate.config.data.on_bad_sample == "skip":
        for mistake in bad[:_LISTED]:
            yield Note(f"{mistake}; left out (on_bad_sample: skip)", is_warning=True)
    if len(bad) > _LISTED:
        rows = counted(len(bad) + len(lengths), "row")
        yield Note(f"{source.path}: {len(bad)} of the first {rows} cannot be used", is_warning=True)
    if lengths:
        span = f"{min(lengths)} to {counted(max(lengths), 'token')}"
        yield Note(f"{source.path}: {counted(len(lengths), 'row')} rendered, {span} each")


def _describe_losses(source: SourceConfig, prepared: Sequence[Any], untrained: int) -> Iterator[Note]:
    """Warnings about first rows of a source that have no effect on training."""
    from megatron_wrap.flow.shared.text import ENCODED

    of = f"of the first {counted(len(prepared), 'row')}"
    if untrained:
        yield Note(f"{source.path}: {untrained} {of} have no trained token; {_LOOK}", is_warning=True)
    encoded = [sample[ENCODED] for sample in prepared if isinstance(sample, Mapping) and ENCODED in sample]
    equal = sum(isinstance(sequences, tuple) and are_equal_answers(sequences) for sequences in encoded)
    if equal:
        text = f"{source.path}: {equal} {of} have equal answers, which express no preference; remove them"
        yield Note(text, is_warning=True)


def _rows_of(candidate: Candidate, source: SourceConfig) -> str:
    """The number of rows of a source that was checked, as text."""
    from megatron_wrap.data.order.sample_sets import check_source

    try:
        rows = check_source(source, every_row=candidate.config.data.on_bad_sample == "error")
    except DataError:
        candidate.unreadable.add(source.path)
        raise
    return "" if rows is None else f": {counted(rows, 'row')}"


def _indexed(candidate: Candidate) -> Iterator[Note]:
    from megatron_wrap.data.indexed.windows import check_indices

    data = candidate.config.data
    prefixes = [source.path for sources in (data.train, *data.validation.values()) for source in sources]
    missing = [prefix for prefix in prefixes if not Path(f"{prefix}.idx").expanduser().is_file()]
    candidate.unreadable.update(prefixes)
    if not missing:  # `check_data_files` reports it
        check_indices(candidate.config)
        candidate.unreadable.clear()
        yield Note(f"indexed files: {', '.join(prefixes) or 'mock data'}")


def is_known_flow(candidate: Candidate) -> bool:
    """Whether the flow can be looked up here; a script of the user may register it."""
    from megatron_wrap.flow.entry import SHIPPED

    return not candidate.own_script or candidate.config.flow.flow_key in SHIPPED


def _sources(config: RunConfig) -> list[SourceConfig]:
    """The sources of training and evaluation, each once."""
    validation = [source for sources in derived.validation_sources(config).values() for source in sources]
    return list({source.path: source for source in [*derived.training_sources(config), *validation]}.values())


def _is_local(source: SourceConfig) -> bool:
    """Whether a source consists of files of this machine. A hub id may have to be downloaded, and a Python source to be
    computed."""
    return source.kind in ("file", "folder", "glob")
