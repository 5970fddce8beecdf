"""A table for the terminal."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines, in columns that are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)
