"""The parts of a step: marks in a profiler's trace, and what a process does now, for messages about a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

DATA, LOSS, OPTIMIZER = "megatron_wrap::data", "megatron_wrap::loss", "megatron_wrap::optimizer"
COMPUTED_TOKENS = "megatron_wrap::computed_tokens="
"""Followed by a number: tokens of this process's replica, with padding, in the micro-batches that follow."""
GRADIENTS, EVALUATION, SAVE = "forward and backward", "evaluation", "save"

_doing: list[str] = []
_changes = [0]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a part of a step for the profiler; without a profiler it costs a few microseconds."""
    from torch.profiler import record_function

    with doing(name.removeprefix("megatron_wrap::")), record_function(name):
        yield


@contextlib.contextmanager
def doing(name: str) -> Iterator[None]:
    """What the process does in the block, for `current_phase`, without a mark for the profiler."""
    _doing.append(name)
    _changes[0] += 1
    try:
        yield
    finally:
        _doing.pop()
        _changes[0] += 1


def current_phase() -> str:
    """What the process does now, from any thread; empty outside of all blocks."""
    outer = _doing[:1]
    return outer[0] if outer else ""


def num_changes() -> int:
    """How many blocks were entered and left so far: a process that makes progress has more later."""
    return _changes[0]
