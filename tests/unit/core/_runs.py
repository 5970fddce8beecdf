"""Runs of these tests: started, and their files."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_wrap.core import MegatronWrap


@contextmanager
def ready(wrap: MegatronWrap) -> Iterator[Any]:
    """A run with its model and optimizer."""
    with wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        yield wrap


def started(*overrides: str) -> Any:
    """run.yaml of the working directory, with its model and optimizer."""
    return ready(MegatronWrap("run.yaml", overrides=overrides))


def write_rows(name: str, rows: Iterable[Any]) -> None:
    """A file of JSON lines."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: str | Path) -> list[Any]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
