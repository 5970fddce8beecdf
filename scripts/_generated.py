"""The command line of a script that generates files of the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(
    files: Mapping[str, str], root: Path, description: str, message: str, arguments: list[str] | None
) -> int:
    """Write the files that differ; with --check only report them; returns the exit status.

    Args:
        files: path below `root` -> text.
        description: description of the script; --help shows its first line.
        message: message of --check, with {} for the files that differ.
        arguments: arguments of the command line; None: those of the process.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    check = parser.parse_args(arguments).check
    stale = {
        name: text
        for name, text in files.items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != text
    }
    if check and stale:
        print(message.format(", ".join(stale)), file=sys.stderr)
        return 1
    for name, text in stale.items():
        (root / name).write_text(text, encoding="utf-8")
    return 0
