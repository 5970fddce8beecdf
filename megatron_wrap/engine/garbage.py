"""Python's garbage collection by schedule."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_at_end() -> Iterator[None]:
    """Delay Python's garbage collection to the end of the block, where the device still updates the parameters: in
    between, a collection of some milliseconds would leave the device without work. A host program that has disabled the
    collection keeps it disabled."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(1)  # what the step has created; older objects are collected at the usual times
