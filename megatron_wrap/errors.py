"""The errors a user can cause. The message of each states what is wrong, with the numbers, and what to do.

Entry points print the message alone and exit with `exit_code`; a Python caller catches `MegatronWrapError`.
"""

import difflib
from collections.abc import Iterable


def closest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, None where no name is like it."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean NAME?` with the closest known name, to end a sentence; empty where no name is like `name`."""
    found = closest(name, known)
    return "" if found is None else f"; did you mean {found}?"


class MegatronWrapError(Exception):
    """Base of every error that the user can fix; anything else that is raised is a defect of ours."""

    exit_code = 2


class ConfigError(MegatronWrapError):
    """A key, type, value or contradiction in the configuration; the message names file, line and dotted path."""


class UnsupportedModel(ConfigError):
    """A Hugging Face config.json asks for what cannot be built, or an architecture has no form in its family."""


class PlatformError(MegatronWrapError):
    """The chosen platform, an installed package or its version cannot do what the configuration asks."""


class LayoutError(MegatronWrapError):
    """The parallel layout does not fit the number of processes, the model or the batch."""


class FlowError(MegatronWrapError):
    """A flow breaks its contract (see `megatron_wrap.flow.base`)."""


class DataError(MegatronWrapError):
    """A data file or a sample is missing, malformed or too long; the message names file and line."""


class CheckpointError(MegatronWrapError):
    """A checkpoint is missing, incomplete, or of another model; the message names the first thing that differs."""


class TrainingError(MegatronWrapError):
    """A step that cannot go on: a loss or gradient that is not finite, or `train` past `train_iters`."""
