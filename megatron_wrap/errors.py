"""The errors a user can cause. Each message states what is wrong, with the numbers, and what to do.

Entry points print only the message and exit with `exit_code`; a Python caller catches `MegatronWrapError`.
"""

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def special_file(path: str | os.PathLike[str]) -> str | None:
    """The message about a pipe, socket or device under the name of a file, which a reader would wait for without end;
    None: `path` is a file, a folder or missing."""
    if not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path):
        return None
    return f"{os.fspath(path)}: is a pipe, socket or device, not a file; write its content to a file"


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


class MegatronWrapError(Exception):
    """Base of all errors that the user can fix; any other exception is a bug in this package."""

    exit_code = 2
    further: tuple["MegatronWrapError", ...] = ()
    """Errors that do not depend on this one, in the order in which they would be raised once it is corrected."""


class Mistakes:
    """Collects independent errors. The first is raised, with the others in its `further`."""

    def __init__(self) -> None:
        self._errors: list[MegatronWrapError] = []

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, error: "MegatronWrapError") -> None:
        """Keeps an error."""
        self._errors += [error, *error.further]

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps an error of the block. After an error, the block may fail in any way, which reports nothing."""
        try:
            yield
        except MegatronWrapError as error:
            self.add(error)
        except Exception:
            if not self._errors:
                raise

    def raise_first(self) -> None:
        """Raises the first error, if there is any."""
        if self._errors:
            first, *further = self._errors
            first.further = tuple(further)
            raise first


class ConfigError(MegatronWrapError):
    """An invalid key, type, value or combination in the configuration; the message names file, line and dotted path."""


class UnsupportedModel(ConfigError):
    """A Hugging Face config.json requires an unsupported feature, or its family cannot express an architecture."""


class PlatformError(MegatronWrapError):
    """The platform, an installed package or its version does not support what the configuration requires."""


class LayoutError(MegatronWrapError):
    """The parallel layout does not fit the number of processes, the model or the batch."""


class FlowError(MegatronWrapError):
    """A flow violates its contract (see `megatron_wrap.flow.contract.base`)."""


class DataError(MegatronWrapError):
    """A data file or a sample is missing, malformed or too long; the message names file and line."""


class CheckpointError(MegatronWrapError):
    """A checkpoint is missing, incomplete, or from another model; the message names the first difference."""


class TrainingError(MegatronWrapError):
    """Training cannot continue: a non-finite loss or gradient, or `train` called after `train_iters` steps."""


class ProcessError(TrainingError):
    """A process of a run has died or was stopped from outside. It is not a mistake of the user; the same command may
    continue the run."""

    exit_code = 1


class ExitInRun(ProcessError):
    """Code that a run calls, such as a flow, has called sys.exit: in the setup, a step, an evaluation or a save."""

    requested = 1
    """The exit code of that call."""
