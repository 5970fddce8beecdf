"""Files that appear under their name only when they are complete: after a kill, the old or the new content is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megatron_wrap.errors import ConfigError, MegatronWrapError


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that replaces `path` when the block ends. An error inside the block leaves `path` as it was."""
    partial = Path(f"{path}.part")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: str | Path, text: str) -> None:
    """Replace the content of a file, in UTF-8."""
    with atomic_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def named_write_errors(
    path: str | Path, advice: str, error_type: type[MegatronWrapError] = ConfigError
) -> Iterator[None]:
    """Turns an OSError of the block, which writes `path`, into an error that names it and what to do."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{path}: cannot be written: {error.strerror or error}; {advice}") from error
