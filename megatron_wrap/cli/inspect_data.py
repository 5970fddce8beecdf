"""`megatron-wrap inspect-data CONFIG`: show the tokens of a run's data that are trained, and find the usual
mistakes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatron_wrap.cli.arguments import add_run_arguments
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.errors import DataError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.utils.atomic_write import named_write_errors

_ON_PAGE = 300


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
    from megatron_wrap.cli.inspect_page import build_page, encoder, shown, summary
    from megatron_wrap.core.local_copies import with_local_copies
    from megatron_wrap.core.validation.paths import check_run
    from megatron_wrap.core.validation.setup import check_flow
    from megatron_wrap.data.chat.tokenizer import run_tokenizer
    from megatron_wrap.data.inspect.inspection import inspect, select_samples
    from megatron_wrap.data.inspect.mistakes import Checks

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


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number}: must be 0 or more")
    return number
