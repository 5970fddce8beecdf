"""Programs in processes forked from the test process. It has imported torch and Megatron-Core, which takes a new
interpreter five seconds of a processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from _interpreters import forked_interpreters

COMMAND = "import sys; from megatron_wrap.cli.main import main; sys.exit(main(sys.argv[1:]))"
"""The program of `megatron-wrap WORDS...`."""


def run_forked(
    program: str, *words: object, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the text of a program; returns its exit code and what it printed.

    Args:
        words: `sys.argv` after the first.
        variables: environment variables besides those of this process.
    """
    command = [sys.executable, "-c", program, *map(str, words)]
    environment = {**os.environ, **(variables or {})}
    with forked_interpreters():
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
