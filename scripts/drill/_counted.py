"""The command line of a drill that repeats a random trial."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path


def run(drill: Callable[[int, int, Path], list[str]], description: str, count: int, trials: str) -> int:
    """Call `drill(count, seed, scratch folder)` and print the failures that it returns; returns the exit status.

    Args:
        count: default of --count, the number of `trials`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help=trials)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        failures = drill(arguments.count, arguments.seed, Path(scratch))
    for failure in failures:
        print(f"WRONG: {failure}")
    return 1 if failures else 0
