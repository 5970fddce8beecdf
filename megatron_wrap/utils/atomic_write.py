"""Files that appear under their name when they are complete: after a kill, the old or the new content is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


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
