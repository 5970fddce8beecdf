"""Errors of metric loggers that cannot start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.errors import ConfigError


@contextlib.contextmanager
def refuse_unwritable(what: str, path: Path) -> Iterator[None]:
    """Convert an OSError of a logger's first write into a ConfigError.

    Args:
        what: description of the files, in the plural, for the message.

    Raises:
        ConfigError: the body raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written to {path}: {error.strerror}; "
            "set megatron_wrap.logger.output_dir to a writable folder"
        ) from error


def missing_package(name: str, package: str) -> ConfigError:
    """The error for a logger whose Python package is not installed."""
    return ConfigError(
        f"{name} logging is enabled but its package is not installed; "
        f"run `pip install {package}` or disable it under megatron_wrap.logger"
    )
