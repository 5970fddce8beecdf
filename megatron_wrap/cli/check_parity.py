"""`megatron-wrap check-parity`: compare a flow on every parallel layout with the same flow on one process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_wrap.cli.arguments import add_run_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_run_arguments(parser)
    parser.add_argument("--flow", metavar="KEY", help="a registered flow or my_package.my_module:MyFlow")
    parser.add_argument(
        "--layouts", metavar="NAMES", help="comma-separated names such as dp2,tp2-sp,cp2 (default: all)"
    )
    parser.add_argument("--max-processes", type=int, default=4, metavar="N", help="largest layout (default: 4)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps of each run (default: 2)")
    parser.add_argument("--samples", metavar="FILE", help="JSON lines instead of the training data of CONFIG")
    parser.add_argument("--keep-model", action="store_true", help="use the model of CONFIG instead of a tiny one")
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda"),
        default="cpu",
        help="processes over gloo, or one GPU per process over NCCL (default: cpu)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 0 if all layouts agree, else 1."""
    from megatron_wrap.data.sources.json_files import JsonLines
    from megatron_wrap.testing.parity import check_parity

    report = check_parity(
        arguments.config,
        arguments.overrides,
        flow=arguments.flow,
        layouts=arguments.layouts.split(",") if arguments.layouts else None,
        max_processes=arguments.max_processes,
        steps=arguments.steps,
        samples=JsonLines(arguments.samples) if arguments.samples else None,
        shrink=not arguments.keep_model,
        platform=arguments.platform,
    )
    print(report.table())
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return 0 if report.agrees else 1
