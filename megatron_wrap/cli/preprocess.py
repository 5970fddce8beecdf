"""`megatron-wrap preprocess`: convert files of text to Megatron-LM's `.bin` and `.idx`, and merge such files."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from megatron_wrap.cli.arguments import add_input_arguments, count, selected
from megatron_wrap.errors import ConfigError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.utils.progress import WorkProgress

if TYPE_CHECKING:
    from megatron_wrap.data.indexed.preprocess import PreprocessProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand; the names are those of Megatron-LM's preprocess_data.py."""
    add_input_arguments(parser, required=False)
    parser.add_argument("--tokenizer", "--tokenizer-model", metavar="FOLDER", help="Hugging Face folder or hub id")
    parser.add_argument(
        "--tokenizer-type", metavar="TYPE", help="accepted from commands of Megatron-LM; only HuggingFaceTokenizer"
    )
    parser.add_argument(
        "--output-prefix", metavar="PREFIX", required=True, help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the tokenizer's eos token")
    parser.add_argument(
        "--workers",
        type=count,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes; the files do not depend on it (default: one per core)",
    )
    parser.add_argument(
        "--partitions",
        type=count,
        default=1,
        metavar="N",
        help="distribute documents round-robin over N parts (default: 1)",
    )
    parser.add_argument(
        "--keep-sequential-samples", action="store_true", help="keep the input's order despite --partitions"
    )
    parser.add_argument("--merge", nargs="+", metavar="PREFIX", help="merge pairs of files, or those of a folder")


def run(arguments: argparse.Namespace) -> int:
    """Writes the files and prints what they contain."""
    if arguments.merge is not None:
        return _merge(arguments)
    for name in ("input", "tokenizer"):
        if getattr(arguments, name) is None:
            raise ConfigError(f"preprocess needs --{name}; see megatron-wrap preprocess --help")
    if arguments.tokenizer_type not in (None, "HuggingFaceTokenizer"):
        raise ConfigError(
            f"--tokenizer-type {arguments.tokenizer_type}: only HuggingFaceTokenizer is read; name the tokenizer's "
            "Hugging Face folder or hub id with --tokenizer, and delete --tokenizer-type"
        )
    from megatron_wrap.data.indexed.preprocess import Preprocessing, preprocess

    settings = Preprocessing(**selected(arguments, *(field.name for field in dataclasses.fields(Preprocessing))))
    with contextlib.ExitStack() as stack:
        bar: WorkProgress | None = None
        done = 0

        def show(progress: PreprocessProgress) -> None:
            nonlocal bar, done
            if bar is None:
                if progress.rows and not progress.complete:
                    print(f"continuing after {counted(progress.rows, 'row')}", file=sys.stderr)
                bar = stack.enter_context(WorkProgress("preprocess", progress.total_bytes - progress.done_bytes, "B"))
            else:
                bar.advance(progress.done_bytes - done)
            done = progress.done_bytes

        try:
            written = preprocess(settings, show)
        except KeyboardInterrupt:
            print("interrupted; the same command continues", file=sys.stderr)
            return 130
    _print_statistics(written, [settings.prefix(key) for key in settings.json_keys])
    return 0


def _print_statistics(written: PreprocessProgress, prefixes: list[str]) -> None:
    print(f"documents        {written.documents:,}")
    print(f"tokens           {written.tokens:,}")
    print(f"bytes per token  {written.text_bytes / max(1, written.tokens):.3f}")
    if written.left_out:
        print(f"bad rows         {written.left_out:,}, the first: {written.messages[0]}")
    for prefix in prefixes:
        print(f"{prefix}.bin, .idx")


def _merge(arguments: argparse.Namespace) -> int:
    from megatron_wrap.data.indexed.index_files import merge

    if arguments.input or arguments.tokenizer:
        raise ConfigError("--merge takes prefixes and --output-prefix alone; delete --input and --tokenizer")
    prefixes = [prefix for name in arguments.merge for prefix in _prefixes(name)]
    documents, tokens = merge(prefixes, arguments.output_prefix)
    contents = f"{counted(documents, 'document')}, {counted(tokens, 'token')} of {counted(len(prefixes), 'prefix')}"
    print(f"{arguments.output_prefix}.bin, .idx: {contents}")
    return 0


def _prefixes(name: str) -> list[str]:
    """The prefix of a name, which may have the ending of a file; for a folder all its prefixes, as in Megatron-LM."""
    folder = os.path.expanduser(name)
    if not os.path.isdir(folder):
        return [name.removesuffix(".idx").removesuffix(".bin")]
    prefixes = sorted({file[:-4] for file in os.listdir(folder) if file.endswith((".bin", ".idx"))})
    if not prefixes:
        raise ConfigError(f"{name}: contains no .bin and .idx; name prefixes, or a folder that contains them")
    return [os.path.join(name, prefix) for prefix in prefixes]
