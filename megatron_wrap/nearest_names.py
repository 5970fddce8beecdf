"""The nearest known name to a misspelled one, for the end of an error message: "; did you mean NAME?"."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

_TYPO = 2
"""Largest number of edits that counts as a misspelling."""


def closest(name: object, known: Iterable[str], further: Iterable[str] = ()) -> str | None:
    """The name most similar to `name`, whatever the case and `-` or `_`; None if none is similar.

    A name that at most two typos separate comes first; then the names in `known` come before those in `further`.
    """
    wanted = _folded(name)
    ranked: list[tuple[int, int, float, int, str]] = []
    for is_further, candidates in enumerate((known, further)):
        for candidate in candidates:
            folded = _folded(candidate)
            edits = _edits(wanted, folded)
            ratio = difflib.SequenceMatcher(None, folded, wanted).ratio()
            if edits <= min(1, len(wanted) - 1) or ratio >= 0.6:
                ranked.append((edits, is_further, -ratio, len(ranked), candidate))
    return min(ranked)[-1] if ranked else None


def did_you_mean(name: object, known: Iterable[str], further: Iterable[str] = ()) -> str:
    """The suffix `; did you mean NAME?` with the closest name; empty if no name is similar."""
    suggestion = closest(name, known, further)
    return "" if suggestion is None else f"; did you mean {suggestion}?"


def missing_path_hint(path: str | os.PathLike[str]) -> str:
    """The end of a sentence about a `path` that does not exist: the closest name in its folder, the folder's content,
    or the part of the path that exists. `~` is the home folder."""
    wanted = Path(path).expanduser()
    if os.path.islink(wanted):
        return f"; it is a link to {os.readlink(wanted)}, which leads to no file"
    folder = wanted.parent
    # the folder of the shipped example is not part of the repository
    build = "; python examples/data/build.py builds the sample data" if "generated" in wanted.parts else ""
    if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
        while not os.path.isdir(folder) and folder != folder.parent:
            folder = folder.parent
        return f"; of its path only {'the working directory' if str(folder) == '.' else folder} exists{build}"
    names = sorted(os.listdir(folder))
    similar = closest(wanted.name, names)
    if similar is not None:
        return f"; did you mean {folder / similar}?"
    if str(folder) == ".":
        return build
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    return f"; {folder} contains {listed}{build}"


def _folded(name: object) -> str:
    return str(name).casefold().replace("-", "_")


def _edits(first: str, second: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbors from one text to the other, at most `_TYPO` + 1."""
    if abs(len(first) - len(second)) > _TYPO:
        return _TYPO + 1
    above: list[int] = []
    row = list(range(len(second) + 1))
    for index, character in enumerate(first, 1):
        before, above, row = above, row, [index]
        for column, other in enumerate(second, 1):
            cost = min(above[column] + 1, row[-1] + 1, above[column - 1] + (character != other))
            swapped = index > 1 and column > 1 and character == second[column - 2] and first[index - 2] == other
            row.append(min(cost, before[column - 2] + 1) if swapped else cost)
    return min(row[-1], _TYPO + 1)
