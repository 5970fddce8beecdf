"""The parts of a step: marks in a profiler's trace, and the current activity of a process, for messages about a
failure."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator

from megatron_wrap.errors import ExitInRun

DATA, LOSS, OPTIMIZER = "megatron_wrap::data", "megatron_wrap::loss", "megatron_wrap::optimizer"
COMPUTED_TOKENS = "megatron_wrap::computed_tokens="
"""Prefix of a mark, followed by a number: tokens of this process's replica, with padding, in the micro-batches that
follow."""
SETUP, GRADIENTS, EVALUATION, SAVE = "setup", "forward and backward", "evaluation", "save"

_doing: list[str] = []
_changes = [0]
_outermost = [""]
listeners: list[Callable[[], None]] = []
"""Functions called when an outermost block begins or ends, in the thread that enters or leaves it."""


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a part of a step for the profiler; without a profiler it costs a few microseconds."""
    from torch.profiler import record_function

    with doing(name.removeprefix("megatron_wrap::")), record_function(name):
        yield


@contextlib.contextmanager
def doing(name: str) -> Iterator[None]:
    """Name the process's activity in the block, for `current_phase`, without a mark for the profiler.

    Raises:
        ExitInRun: instead of the SystemExit of code that the block calls, which would end the process as if the run
            were complete.
    """
    is_outermost = not _doing
    if is_outermost:
        _outermost[0] = name
    _doing.append(name)
    _changes[0] += 1
    if is_outermost:
        _notify()
    try:
        yield
        if is_outermost:
            _outermost[0] = ""  # not after an error: its report names the block
    except SystemExit as end:
        raise _exit_in_run(end) from end
    finally:
        _doing.pop()
        _changes[0] += 1
        if is_outermost:
            _notify()


def _notify() -> None:
    for listener in listeners:
        listener()


def _exit_in_run(end: SystemExit) -> ExitInRun:
    code = end.code
    number = 0 if code is None else code & 0xFF if isinstance(code, int) else 1  # as the kernel and Python convert it
    text = f" ({code})" if isinstance(code, str) else ""
    frame = traceback.extract_tb(end.__traceback__)[-1]
    error = ExitInRun(
        f"exit code {number}{text} of {frame.filename}, line {frame.lineno}, in {frame.name}, during {_outermost[0]}: "
        "what a run calls must not end its process; raise an exception there, or end the run with on_step of wrap.fit"
    )
    error.requested = number
    return error


def current_phase() -> str:
    """Name of the outermost block, also after an error has left it; empty outside of all blocks. It can be called from
    any thread."""
    return _outermost[0]


def is_inside() -> bool:
    """Whether the process is in a block now, from any thread."""
    return bool(_doing)


def num_changes() -> int:
    """Number of times that blocks were entered or left so far; it grows while a process makes progress."""
    return _changes[0]
