"""Scheduled runs of Python's garbage collection."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_is_due = threading.Event()
"""Set while a collection is delayed."""


@contextmanager
def delayed_collection() -> Iterator[None]:
    """Delay Python's garbage collection to `collect_delayed`, at the latest to the end of the block. At other times, a
    collection of some milliseconds would leave the device without work. A host program that has disabled the collection
    keeps it disabled."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _is_due.set()
    try:
        yield
    finally:
        collect_delayed()
        gc.enable()


def collect_delayed() -> None:
    """Collect the garbage of the step in a `delayed_collection` now, where the host waits for the device; older objects
    are collected at the usual times."""
    if _is_due.is_set():
        _is_due.clear()
        gc.collect(1)
