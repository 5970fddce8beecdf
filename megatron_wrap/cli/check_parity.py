"""`megatron-wrap check-parity`: show that a flow trains alike on every parallel layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("config", help="YAML of the run; its flow, its options and its data are taken")
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b.c=value", help="the last word on a key")
    parser.add_argument("--flow", metavar="KEY", help="a registered flow or my_package.my_module:MyFlow")
    parser.add_argument("--layouts", metavar="NAMES", help="names such as dp2,tp2-sp,cp2 joined by commas")
    parser.add_argument("--max-processes", type=int, default=4, help="leave layouts of more processes out (default 4)")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of each run (default 2)")
    parser.add_argument("--samples", metavar="FILE", help="JSON lines in place of the configuration's training data")
    parser.add_argument("--keep-model", action="store_true", help="do not make the model tiny")
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda"),
        default="cpu",
        help="gloo processes, or one GPU each over NCCL (default cpu)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")


def run(arguments: argparse.Namespace) -> int:
    """0 when all layouts agree, 1 when one disagrees; an error of the command or the flow is 2."""
    from megatron_wrap.data.jsonl import JsonLines
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
