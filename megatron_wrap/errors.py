"""The errors a user can cause. Each message states what is wrong, with the numbers, and what to do.

Entry points print only the message and exit with `exit_code`; a Python caller catches `MegatronWrapError`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def special_file(path: str | os.PathLike[str]) -> str | None:
    """The message about a pipe, socket or device under the name of a file, which a reader would wait for without end;
    None: `path` is a file, a folder or missing."""
    if not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path):
        return None
    return f"{os.fspath(path)}: is a pipe, socket or device, not a file; write its content to a file"


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
