"""`megatron-wrap train-tokenizer`: train a byte-level BPE tokenizer on the inputs of `preprocess`."""

from __future__ import annotations

import argparse
import sys

from megatron_wrap.cli.arguments import add_input_arguments, count, selected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_input_arguments(parser, required=True)
    parser.add_argument("--vocab-size", type=count, required=True, metavar="N", help="tokens, with the special ones")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--special-tokens",
        nargs="+",
        default=["<|endoftext|>"],
        metavar="TOKEN",
        help="the first ends a document (default: <|endoftext|>)",
    )
    parser.add_argument(
        "--min-frequency", type=count, default=2, metavar="N", help="occurrences of a pair that is merged (default: 2)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder and prints its path."""
    from megatron_wrap.data.indexed.documents import InputFiles
    from megatron_wrap.data.indexed.tokenizer_training import train_tokenizer

    size = train_tokenizer(
        InputFiles(arguments.input, arguments.json_keys, arguments.suffixes, arguments.text_unit),
        arguments.json_keys,
        arguments.output,
        **selected(arguments, "vocab_size", "special_tokens", "min_frequency", "max_documents", "on_bad_document"),
        show_progress=sys.stderr.isatty(),
    )
    print(f"{arguments.output}: {size:,} tokens")
    return 0
