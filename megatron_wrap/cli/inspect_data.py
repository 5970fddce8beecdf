"""`megatron-wrap inspect-data CONFIG`: show which tokens of a run's data are trained, and find the usual mistakes."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import RunConfig, derived
from megatron_wrap.config.paths import output_dir
from megatron_wrap.config.sources import SourceConfig
from megatron_wrap.errors import ConfigError, DataError, did_you_mean
from megatron_wrap.platform import choose_platform

if TYPE_CHECKING:
    from megatron_wrap.data.inspection import Inspected, Tokens
    from megatron_wrap.flow import MegatronWrapTrainingFlowBase

EXAMPLES = (
    ("five samples with their trained tokens, a summary, and a page", "inspect-data configs/tiny-llama-sft.yaml"),
    (
        "an evaluation set, with the loss on the last answer only, and a page of that name",
        "inspect-data configs/tiny-llama-sft.yaml --split validation --output validation.html "
        "megatron_wrap.flow.loss_on=last_assistant",
    ),
)
_ON_PAGE = 300
_COLORS = {"trained": "\x1b[30;42m", "cut": "\x1b[2;9m", "other": ""}
_SIGNS = {"trained": ("[[", "]]"), "cut": ("~~", "~~"), "other": ("", "")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("config", metavar="CONFIG", help="YAML of the run")
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b.c=value", help="overrides, applied last")
    parser.add_argument("-n", type=_count, default=5, metavar="N", help="samples to print (default: 5)")
    parser.add_argument(
        "--split", default="train", metavar="NAME", help="train (default), or the name of an evaluation set"
    )
    parser.add_argument(
        "--limit",
        type=_count,
        default=10_000,
        metavar="N",
        help="read at most N samples, evenly spaced (default: 10000); 0: all",
    )
    parser.add_argument(
        "--output", metavar="FILE.html", help="the page (default: inspect-data-SPLIT.html in output_dir)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints samples and a summary, and writes the page; mistakes in the data do not change the exit code."""
    from megatron_wrap.bridge.hub import read_run
    from megatron_wrap.cli.inspect_page import build_page, summary
    from megatron_wrap.cli.precheck import check_flow
    from megatron_wrap.config.checks import check_run
    from megatron_wrap.data.inspection import inspect
    from megatron_wrap.data.mistakes import Checks
    from megatron_wrap.data.tokenizer import load_tokenizer

    config = read_run(arguments.config, arguments.overrides)
    check_run(config)
    check_flow(config)
    tokenizer = None if config.data.tokenizer is None else load_tokenizer(config.data.tokenizer)
    checked_by = tokenizer
    if derived.is_indexed(config.data):
        checked_by = None  # a window begins and ends anywhere in a document
        sources: Sequence[SourceConfig] = ()
        total: int | None
        total, samples = read_opened([windows_of(config, arguments.split, tokenizer)], arguments.limit)
    else:
        sources = sources_of(config, arguments.split)
        total, samples = read_samples(sources, derived.mock_samples(config.data), arguments.limit)
    found = inspect(
        samples,
        encoder(config, tokenizer),
        Checks(checked_by, config.flow.options.get("loss_on") == "all"),
        config.train.seq_length,
        show=max(arguments.n, _ON_PAGE),
        max_lengths={source.name: source.max_length for source in sources if source.max_length is not None},
    )
    path = Path(arguments.output or Path(output_dir(config), f"inspect-data-{arguments.split}.html"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(build_page(found, total, config, arguments.split, tokenizer), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}; give another file") from error
    for sample in found.shown[: arguments.n]:
        print(shown(sample, tokenizer, in_color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    print(summary(found, total, config.train.micro_batch_size))
    print(f"page: {path}")
    return 0


def sources_of(config: RunConfig, split: str) -> Sequence[SourceConfig]:
    """The sources of the training set, or of an evaluation set.

    Raises:
        ConfigError: there is no such evaluation set. DataError: the run has no training data.
    """
    if split != "train":
        sets = derived.validation_sources(config)
        if split not in sets:
            names = ", ".join(["train", *sets])
            raise ConfigError(f"--split {split}: the run has {names}{did_you_mean(split, sets)}")
        return sets[split]
    sources = derived.training_sources(config)
    if not sources and derived.mock_samples(config.data) is None:
        raise DataError(
            "the run has no training data, because its caller passes samples; give megatron_wrap.data.train=FILE"
        )
    return sources


def windows_of(config: RunConfig, split: str, tokenizer: Any) -> tuple[str, Any]:
    """Name and windows of the training set, or of an evaluation set, of indexed data.

    Raises:
        ConfigError: there is no such evaluation set. DataError: as `open_indexed`.
    """
    from megatron_wrap.cli.one_process import vocabulary_size
    from megatron_wrap.data.indexed import open_indexed

    choose_platform(config.init.platform).install()  # Megatron-Core's modules are imported for it
    data = open_indexed(config, vocabulary_size(config, tokenizer), tokenizer)
    if split == "train":
        return split, data.training.windows
    if split not in data.evaluation:
        names = ", ".join(["train", *data.evaluation])
        raise ConfigError(f"--split {split}: the run has {names}{did_you_mean(split, data.evaluation)}")
    return split, data.evaluation[split]


def read_samples(
    sources: Sequence[SourceConfig], mock_samples: int | None, limit: int
) -> tuple[int | None, Iterator[tuple[Callable[[], str], str, Any]]]:
    """Number of samples of all sources (None: one of them streams), and for each sample that is read its place, source
    and content, in the order of the files; in place of a row that cannot be used its DataError.

    Args:
        limit: read at most so many, evenly spaced; of a streaming source the first ones. 0: all.
    """
    from megatron_wrap.data.sources import NumberedSamples, open_source

    streaming = any(source.streaming for source in sources)
    first = limit or 10_000  # of a source without an end
    opened: list[tuple[str, Any]] = [("mock", NumberedSamples(mock_samples))] if mock_samples is not None else []
    if not opened:
        bounded = [
            replace(source, samples=min(source.samples or first, first)) if source.streaming else source
            for source in sources
        ]
        opened = [(source.name, open_source(source)) for source in bounded]
    total, samples = read_opened(opened, limit)
    return None if streaming else total, samples


def read_opened(
    opened: Sequence[tuple[str, Any]], limit: int
) -> tuple[int, Iterator[tuple[Callable[[], str], str, Any]]]:
    """`read_samples` of sets that are open, each with its name."""
    total = sum(len(samples) for _, samples in opened)
    step = max(1.0, total / limit) if limit else 1.0

    def read() -> Iterator[tuple[Callable[[], str], str, Any]]:
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
                yield functools.partial(samples.where, index), name, sample
            begin += len(samples)

    return total, read()


def encoder(config: RunConfig, tokenizer: Any) -> Callable[[Any], Sequence[Tokens]]:
    """From a sample to its sequences, by the run's flow in this process.

    Raises:
        ConfigError: the vocabulary size is not known.
    """
    from megatron_wrap.cli.one_process import flow_of_one_rank
    from megatron_wrap.data.chat import ChatTokens
    from megatron_wrap.data.inspection import tokens_of
    from megatron_wrap.flow.text import ENCODED

    flow = flow_of_one_rank(config, tokenizer)
    rule = config.flow.options.get("truncation", "right")

    def encode(sample: Any) -> Sequence[Tokens]:
        prepared = flow.prepare_sample(sample)
        encoded = prepared.get(ENCODED) if isinstance(prepared, Mapping) else None
        sequences = (encoded,) if isinstance(encoded, ChatTokens) else encoded
        if isinstance(sequences, tuple) and all(isinstance(tokens, ChatTokens) for tokens in sequences):
            return [tokens_of(tokens, flow.seq_length, rule) for tokens in sequences]
        return _collated(flow, prepared)

    return encode


def _collated(flow: MegatronWrapTrainingFlowBase, prepared: Any) -> Sequence[Tokens]:
    """The sequences of a sample that the flow collates alone."""
    from megatron_wrap.data.inspection import Kind, Tokens
    from megatron_wrap.flow.collated import checked_fields, common_width, sequence_lengths

    inputs, loss_inputs = checked_fields(flow, flow.collate_data_micro_batch(iter([prepared])))
    if "loss_mask" not in loss_inputs or "input_ids" not in inputs:
        raise ConfigError(
            f"{type(flow).__name__} collates no loss_mask and input_ids, so its trained tokens are not known; add "
            "loss_mask to its loss inputs"
        )
    found = []
    for row, length in enumerate(sequence_lengths(flow, inputs, common_width(flow, inputs, loss_inputs)).tolist()):
        ids, mask = inputs["input_ids"][row, :length].tolist(), loss_inputs["loss_mask"][row, :length].tolist()
        if "labels" in loss_inputs and length:  # the loss of a place is that of the token after it
            ids, mask = [*ids, int(loss_inputs["labels"][row, length - 1])], [0, *mask]
        kinds: list[Kind] = ["trained" if value else "other" for value in mask]
        found.append(Tokens(ids, kinds, length))
    return found


def shown(sample: Inspected, tokenizer: Any, in_color: bool) -> str:
    """A sample for the terminal: trained tokens in color or in [[ ]], truncated ones struck out or in ~~ ~~."""
    from megatron_wrap.cli.inspect_page import facts
    from megatron_wrap.data.inspection import segments
    from megatron_wrap.report.page import visible

    lines = [f"{sample.place()}  {', '.join(facts(sample))}"]
    for tokens in sample.sequences:
        runs = []
        for text, kind in segments(tokenizer, tokens):
            begin, end = (_COLORS[kind], "\x1b[0m") if in_color and _COLORS[kind] else _SIGNS[kind]
            runs.append(f"{begin}{visible(text)}{end}" if not in_color or kind != "other" else visible(text))
        lines.append("".join(runs))
    return "\n".join([*lines, ""])


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number}: must be 0 or more")
    return number
