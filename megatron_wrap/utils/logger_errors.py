"""Errors of metric loggers: a logger that cannot start ends the run, an error of a running logger does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_wrap.errors import ConfigError, MegatronWrapError
from megatron_wrap.utils.dist_logger import logger

WRITABLE = "set megatron_wrap.logger.output_dir to a writable folder"
"""Advice for the case that a logger's first write fails."""


class ToleratedErrors:
    """Errors of running loggers, such as a full disk or a lost connection: the first of each is a warning, training
    continues, and each logger is called again in later steps."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """A context whose errors count as errors of the logger `name`; a MegatronWrapError is raised."""
        try:
            yield
        except MegatronWrapError:
            raise
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                logger.warning_rank_0(
                    f"{name} fails: {reason or type(error).__name__}; training continues, what it cannot write is "
                    "missing, and later errors of it are not shown"
                )


def missing_package(name: str, package: str) -> ConfigError:
    """The error for a logger whose Python package is not installed."""
    return ConfigError(
        f"{name} logging is enabled but its package is not installed; "
        f"run `pip install {package}` or disable it under megatron_wrap.logger"
    )
