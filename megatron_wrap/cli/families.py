"""`megatron-wrap families`: the Hugging Face families that can be loaded, their comparison with transformers, and the
families that are refused."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from megatron_wrap.cli.text_table import text_table
from megatron_wrap.config.hugging_face import FAMILIES, UNSUPPORTED, WITH_VISION

_HEAD = ("model_type", "difference", "layouts", "sizes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; scripts/families.py measured the numbers."""
    rows = list(_rows())
    refused = dict(sorted(UNSUPPORTED.items()))
    if arguments.json:
        named = [dict(zip(_HEAD, row, strict=True)) for row in rows]
        print(json.dumps({"families": named, "refused": refused}, indent=1))
        return 0
    shown = [_HEAD, *((name, "" if worst is None else f"{worst:.1e}", *lists) for name, worst, *lists in rows)]
    texts = [[cell if isinstance(cell, str) else " ".join(cell) for cell in row] for row in shown]
    print(text_table(texts))
    print("difference: largest absolute difference of fp32 logits from transformers', random models of odd shapes")
    print(f"of {', '.join(sorted(WITH_VISION))} the language model alone is read; refused:")
    for name, reason in refused.items():
        print(f"  {name}: {reason}")
    return 0


def _rows() -> Iterator[tuple[str, float | None, list[str], list[str]]]:
    """(model_type, largest difference, layouts, architectures) of each family; None if it was not measured."""
    content = resources.files("megatron_wrap.bridge").joinpath("measured_families.json").read_text("utf-8")
    measured: dict[str, Any] = json.loads(content)
    names = FAMILIES.keys()
    for name in names:
        cases = [case for case in measured["cases"].values() if case["model_type"] == name]
        worst = max((case["largest_difference"] for case in cases), default=None)
        layouts = {layout: None for case in cases for layout in case["layouts"]}
        yield name, worst, list(layouts), measured["sizes"].get(name, [])
