"""How long the processes of a run have given no sign of life, or made no progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.metrics.phases import DATA, GRADIENTS, LOSS, OPTIMIZER

_DATA, *_REST = (name.removeprefix("megatron_wrap::") for name in (DATA, GRADIENTS, LOSS, OPTIMIZER))
_IN_A_STEP = {_DATA, *_REST}
"""Phases as `current_phase` returns them."""


class Silence:
    """How long each process has given no sign of life."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._last: dict[int, int] = {}

    def longest(self, beats: Mapping[int, int | None], passed: float) -> tuple[int, float] | None:
        """The rank that has been silent for the longest time, and its seconds."""
        for rank, beat in beats.items():
            if beat is not None:
                self._seconds[rank] = self._seconds.get(rank, 0.0) + passed if self._last.get(rank) == beat else 0.0
                self._last[rank] = beat
        return max(self._seconds.items(), key=lambda entry: entry[1], default=None)


class Stall:
    """How long all processes of this node have been in a step in which none makes progress.

    Steps differ: a limit counts as exceeded after `seconds` and after ten times the longest pause since the second
    step; in the first two, in which kernels are compiled, and while a process is in the phase data, after ten minutes.

    Args:
        seconds: the limit.
    """

    _FIRST_STEPS, _LONG_SECONDS, _TIMES = 2, 600.0, 10

    def __init__(self, seconds: float) -> None:
        self._seconds, self._longest, self._quiet = seconds, 0.0, 0.0
        self._first: int | None = None
        self._iteration: int | None = None
        self._last: list[Any] = []

    def update(self, states: Sequence[Mapping[str, Any] | None], passed: float) -> float | None:
        """The seconds without progress if they are too many.

        Args:
            states: what each process last wrote.
            passed: seconds since the last call.
        """
        last, self._last = self._last, [_progress(state) for state in states]
        iterations = [state.get("iteration") for state in states if state is not None]
        if None in iterations or len(iterations) < len(states):
            return None
        iteration = min(number for number in iterations if number is not None)
        self._first = iteration if self._first is None else self._first
        before, self._iteration = self._iteration, iteration
        if self._last != last:
            self._longest = max(self._longest, self._quiet if before is not None and before > self._first else 0.0)
            self._quiet = 0.0
            return None
        phases = {state.get("phase") for state in states if state is not None}
        if not phases <= _IN_A_STEP:
            self._quiet = 0.0  # an evaluation, a save, or the user's own program
            return None
        self._quiet += passed
        is_long = iteration < self._first + self._FIRST_STEPS or _DATA in phases
        limit = max(self._seconds, self._TIMES * self._longest, self._LONG_SECONDS if is_long else 0.0)
        if self._quiet < limit:
            return None
        seconds, self._quiet = self._quiet, 0.0
        return seconds


def _progress(state: Mapping[str, Any] | None) -> Any:
    return None if state is None else (state.get("iteration"), state.get("phase"), state.get("progress"))
