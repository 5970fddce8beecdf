"""`megatron-wrap inspect-data CONFIG`: show which tokens of a run's data are trained, and find the usual mistakes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.cli.arguments import add_run_arguments
from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.utils.atomic_write import named_write_errors

if TYPE_CHECKING:
    from megatron_wrap.data.inspect.inspection import Inspected
    from megatron_wrap.data.inspect.mistakes import Tokens
    from megatron_wrap.flow import MegatronWrapTrainingFlowBase

_ON_PAGE = 300
_COLORS = {"trained": ("\x1b[30;42m", "\x1b[0m"), "cut": ("\x1b[2;9m", "\x1b[0m"), "other": ("", "")}
_SIGNS = {"trained": ("[[", "]]"), "cut": ("~~", "~~"), "other": ("", "")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_run_arguments(parser)
    parser.add_argument("-n", type=_count, default=5, metavar="N", help="samples to print (default: 5)")
    split = "train (default), or the name of an evaluation set"
    parser.add_argument("--split", default="train", metavar="NAME", help=split)
    limit = "read at most N samples, evenly spaced (default: 10000); 0: all"
    parser.add_argument("--limit", type=_count, default=10_000, metavar="N", help=limit)
    parser.add_argument(
        "--output", metavar="FILE.html", help="the page (default: inspect-data-SPLIT.html in output_dir)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints samples and a summary, and writes the page; mistakes in the data do not change the exit code, unless no
    token is trained.

    Raises:
        DataError: no token of the samples is trained.
    """
    from megatron_wrap.bridge.loading.hub import read_run
    from megatron_wrap.cli.inspect_page import build_page, summary
    from megatron_wrap.config.checks.run import check_run
    from megatron_wrap.core.remote.local_copies import with_local_copies
    from megatron_wrap.core.validation.setup import check_flow
    from megatron_wrap.data.chat.tokenizer import run_tokenizer
    from megatron_wrap.data.inspect.inspection import inspect
    from megatron_wrap.data.inspect.mistakes import Checks
    from megatron_wrap.data.inspect.samples import select_samples

    config = with_local_copies(read_run(arguments.config, arguments.overrides))
    check_run(config)
    check_flow(config)
    tokenizer = run_tokenizer(config.data)
    selection = select_samples(config, arguments.split, tokenizer, arguments.limit)
    # a window begins and ends anywhere in a document, so its tokens are not checked
    checks = Checks(None if derived.is_indexed(config.data) else tokenizer, config.flow.options.get("loss_on") == "all")
    inspection = inspect(
        selection.samples,
        encoder(config, tokenizer),
        checks,
        config.train.seq_length,
        show=max(arguments.n, _ON_PAGE),
        max_lengths=selection.max_lengths,
    )
    path = Path(arguments.output or Path(output_dir(config), f"inspect-data-{arguments.split}.html"))
    with named_write_errors(f"--output {path}", "give another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(build_page(inspection, selection, config, arguments.split, tokenizer), encoding="utf-8")
    for sample in inspection.shown[: arguments.n]:
        print(shown(sample, tokenizer, in_color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    print(summary(inspection, selection.total, config))
    print(f"page: {path}")
    if not inspection.counts.trained:
        rows = counted(inspection.counts.samples, "sample")
        raise DataError(f"no token of the {rows} is trained; look for answers, for truncation, or at flow.loss_on")
    return 0


def encoder(config: RunConfig, tokenizer: Any) -> Callable[[Any], Sequence[Tokens]]:
    """From a sample to its sequences, by the run's flow in this process.

    Raises:
        ConfigError: the vocabulary size is not known.
    """
    from megatron_wrap.config.checks.vocabulary import model_vocab_size
    from megatron_wrap.data.chat.encode import ChatTokens
    from megatron_wrap.data.inspect.inspection import tokens_of
    from megatron_wrap.engine.setup.flow import build_flow
    from megatron_wrap.flow.shared.text import ENCODED

    flow = build_flow(config, tokenizer, model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path))
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
    from megatron_wrap.data.inspect.inspection import tokens_of_row
    from megatron_wrap.flow.contract.collated import checked_fields, common_width, sequence_lengths

    inputs, loss_inputs = checked_fields(flow, flow.collate_data_micro_batch(iter([prepared])))
    if "loss_mask" not in loss_inputs or "input_ids" not in inputs:
        raise ConfigError(
            f"{type(flow).__name__} collates no loss_mask and input_ids, so its trained tokens are not known; add "
            "loss_mask to its loss inputs"
        )
    lengths = sequence_lengths(flow, inputs, common_width(flow, inputs, loss_inputs)).tolist()
    ids, masks = inputs["input_ids"].tolist(), loss_inputs["loss_mask"].tolist()
    labels = loss_inputs["labels"].tolist() if "labels" in loss_inputs else [None] * len(lengths)
    return [tokens_of_row(*row) for row in zip(ids, masks, labels, lengths, strict=True)]


def shown(sample: Inspected, tokenizer: Any, in_color: bool) -> str:
    """A sample for the terminal: trained tokens in color or in [[ ]], truncated ones struck out or in ~~ ~~."""
    from megatron_wrap.cli.inspect_page import facts
    from megatron_wrap.data.inspect.inspection import segments
    from megatron_wrap.report.page import visible

    lines = [f"{sample.where()}  {', '.join(facts(sample))}"]
    for tokens in sample.sequences:
        marks = _COLORS if in_color else _SIGNS
        runs = ((*marks[kind], visible(text)) for text, kind in segments(tokenizer, tokens))
        lines.append("".join(f"{begin}{text}{end}" for begin, end, text in runs))
    return "\n".join([*lines, ""])


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number}: must be 0 or more")
    return number
