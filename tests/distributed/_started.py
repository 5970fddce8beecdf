"""A run that is set up, for what a rank does in a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def started(config: Path, overrides: Sequence[str]) -> Iterator[Any]:
    """Model and optimizer of a run on this rank's layout."""
    from megatron_wrap.core import MegatronWrap

    with MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        yield wrap
