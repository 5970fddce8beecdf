"""A run that is set up, for functions that run on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def started(config: Path, overrides: Sequence[str]) -> Iterator[Any]:
    """A run with model and optimizer on the layout of `overrides`."""
    from megatron_wrap.core import MegatronWrap

    with MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        yield wrap
