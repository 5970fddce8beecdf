"""Arguments that several subcommands declare."""

from __future__ import annotations

import argparse
from typing import Any


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares CONFIG and its overrides."""
    parser.add_argument("config", metavar="CONFIG", help="YAML of the run")
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b.c=value", help="overrides, applied last")


def add_input_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    """Declares --input, the files of text, and the options of reading them."""
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        required=required,
        help="JSON lines (also .gz, .zst), parquet, text, source code: files, patterns, folders",
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of rows, columns (default: text)"
    )
    parser.add_argument(
        "--suffixes", nargs="+", default=[], metavar="END", help="take only files with these endings, such as .py"
    )
    parser.add_argument(
        "--text-unit",
        choices=("file", "paragraph", "line"),
        default="file",
        help="a document of files that are neither JSON nor parquet (default: file)",
    )
    parser.add_argument("--max-documents", type=count, metavar="N", help="read no more rows (default: all)")
    parser.add_argument(
        "--on-bad-document",
        choices=("error", "skip"),
        default="error",
        help="empty documents, malformed rows (default: error)",
    )


def count(text: str) -> int:
    """A number of at least 1; ValueError, which argparse reports, for any other text."""
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is below 1")
    return value


def selected(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of some arguments, as keyword arguments of a function whose parameters have their names."""
    return {name: getattr(arguments, name) for name in names}
