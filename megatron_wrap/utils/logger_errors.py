"""What metric loggers report when they cannot begin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.errors import ConfigError


@contextlib.contextmanager
def refuse_unwritable(what: str, path: Path) -> Iterator[None]:
    """For the first write of a logger.

    Args:
        what: what is written, in the plural.

    Raises:
        ConfigError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written to {path}: {error.strerror}; "
            "set megatron_wrap.logger.output_dir to a folder that this user may write"
        ) from error


def missing_package(name: str, package: str) -> ConfigError:
    """The error for a logger whose Python package is not installed."""
    return ConfigError(
        f"{name} logging is switched on but the package is not installed; "
        f"run `pip install {package}` or switch it off under megatron_wrap.logger"
    )
