"""The errors a user can cause. Each message states what is wrong, with the numbers, and what to do.

Entry points print only the message and exit with `exit_code`; a Python caller catches `MegatronWrapError`.
"""

import difflib
from collections.abc import Iterable


def closest(name: object, known: Iterable[str]) -> str | None:
    """The known name most similar to `name`; None if none is similar."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The suffix `; did you mean NAME?` with the closest known name; empty if no known name is similar."""
    found = closest(name, known)
    return "" if found is None else f"; did you mean {found}?"


class MegatronWrapError(Exception):
    """Base of all errors that the user can fix; any other exception is a bug in this package."""

    exit_code = 2


class ConfigError(MegatronWrapError):
    """An invalid key, type, value or combination in the configuration; the message names file, line and dotted path."""


class UnsupportedModel(ConfigError):
    """A Hugging Face config.json requires an unsupported feature, or its family cannot express an architecture."""


class PlatformError(MegatronWrapError):
    """The platform, an installed package or its version does not support what the configuration requires."""


class LayoutError(MegatronWrapError):
    """The parallel layout does not fit the number of processes, the model or the batch."""


class FlowError(MegatronWrapError):
    """A flow violates its contract (see `megatron_wrap.flow.base`)."""


class DataError(MegatronWrapError):
    """A data file or a sample is missing, malformed or too long; the message names file and line."""


class CheckpointError(MegatronWrapError):
    """A checkpoint is missing, incomplete, or from another model; the message names the first difference."""


class TrainingError(MegatronWrapError):
    """Training cannot continue: a non-finite loss or gradient, or `train` called after `train_iters` steps."""
