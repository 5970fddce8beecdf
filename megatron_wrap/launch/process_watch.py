"""Watch over a run's processes in the program that started them: which process failed, stopped or makes no progress,
where it is, and the stacks of the others."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.launch.process_records import ENDS, FLIGHT_RECORDER, Ending, ProcessRecords
from megatron_wrap.metrics.phases import DATA, GRADIENTS, LOSS, OPTIMIZER
from megatron_wrap.platform.base.machine import how_it_ended, process_state

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAILURE = "failure.json"
"""Name of the report in the output folder."""
_TICK_SECONDS, _START_TICK_SECONDS = 1.0, 0.1
"""Seconds between two looks; the second value applies until all processes are known."""
_SIMULTANEOUS_SECONDS = 1.0
"""Seconds within which the processes that depend on an ended process may record their errors before its end is
noticed."""
_DATA, *_REST = (name.removeprefix("megatron_wrap::") for name in (DATA, GRADIENTS, LOSS, OPTIMIZER))
_IN_A_STEP = {_DATA, *_REST}
"""Phases of a step, as `current_phase` returns them."""


class ProcessWatch:
    """Reads the heartbeats of this node's processes and reports failures. Kills a process that has stopped, and the
    remaining processes after one has left before the end of the run.

    Args:
        records: files that the processes write.
        ranks: their global ranks.
        report: path of `failure.json`; an earlier one is removed.
        seconds: seconds without a heartbeat after which a process counts as stopped, and without progress in a step
            after which one counts as stuck (`Stall`); None: no limit.
        is_alone: whether there is no other node.
    """

    def __init__(
        self,
        records: ProcessRecords,
        ranks: range,
        report: Path,
        seconds: float | None,
        is_alone: bool = True,
    ) -> None:
        self._ranks, self._report, self._seconds, self._is_alone = ranks, report, seconds, is_alone
        self._records = records
        self._stopped: tuple[int, str] | None = None
        self.first_end: tuple[int, float] | None = None
        """Rank of the first process that did not end as a run does, and its time by `time.time()`; None: there is
        none."""
        self.held: set[int] = set()
        """Ranks of processes that had recorded the end of the run, did not end, and were killed."""
        self._ends: queue.SimpleQueue[tuple[int, int | None] | None] = queue.SimpleQueue()
        """(rank, exit code) of each process that has ended; None: the watch ends."""
        with contextlib.suppress(OSError):
            report.unlink()
        for rank in ranks:
            with contextlib.suppress(OSError):
                (report.parent / FLIGHT_RECORDER / f"rank_{rank}").unlink()
        self._thread = threading.Thread(target=self._watch, name="process watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch; a second call does nothing."""
        self._ends.put(None)
        self._thread.join()

    def failed(
        self,
        exit_codes: Mapping[int, int],
        first: int,
        message: str,
        tracebacks: Mapping[int, str] | None = None,
    ) -> str:
        """Write the report of a failure; returns the sentence about it.

        Args:
            exit_codes: global rank -> exit code of each process that did not end as the run does; negative: a signal.
            first: the rank that failed first.
            message: message of the first rank's error; empty if it has left none.
            tracebacks: rank -> traceback of its error, of the ranks that have recorded one.
        """
        self.close()
        states = {rank: self._records.state(rank) or {"rank": rank} for rank in self._ranks}
        cause = cause_of(exit_codes[first])
        if self._stopped is not None:
            first, cause = self._stopped
        elif message and exit_codes[first] == -signal.SIGTERM:  # the agent's signal, while the exception ended it
            cause = "ended with exit code 1"
        failed, others = states[first], {rank: text for rank, text in (tracebacks or {}).items() if text}
        content = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **failed,
            "cause": cause,
            "message": message,
            "traceback": others.pop(first, ""),
            "exit_codes": {str(rank): code for rank, code in sorted(exit_codes.items())},
            "processes": list(states.values()),
            "stacks": {str(rank): text for rank, text in sorted(self._records.stacks.items())},
            "tracebacks": {str(rank): text for rank, text in sorted(others.items())},
        }
        written = ""
        with contextlib.suppress(OSError):
            self._report.parent.mkdir(parents=True, exist_ok=True)
            kept = self._records.keep_collectives(self._ranks, self._report.parent / FLIGHT_RECORDER)
            content["collectives"] = {str(rank): record for rank, record in kept.items()}
            self._report.write_text(hide_secrets(json.dumps(content, indent=1)) + "\n", encoding="utf-8")
            written = f"; {self._report} has the state of all"
        return f"rank {first}{_where(failed)} {cause}{written}"

    def _watch(self) -> None:
        """Watch the processes until one fails or the watch is closed. The time between two looks counts as at most two
        ticks, because this process itself may have been stopped."""
        silence, stall, known = Silence(), Stall(self._seconds or 0.0), set[int]()
        before, finished_seconds = time.monotonic(), 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                end = self._ends.get(timeout=_TICK_SECONDS if len(known) == len(self._ranks) else _START_TICK_SECONDS)
                if end is not None and self._has_failed(*end):
                    self._failed_first(*end)
                if end is None or self._has_failed(*end):
                    return
            now = time.monotonic()
            passed, before = min(now - before, 2 * _TICK_SECONDS), now
            states = {rank: self._records.state(rank) for rank in self._ranks}
            for rank, state in states.items():
                if state is not None and rank not in known:
                    known.add(rank)
                    waiting = threading.Thread(target=self._wait_for, args=(rank, state["process"]), daemon=True)
                    waiting.start()
            silent = silence.longest({rank: self._records.beat(rank) for rank in self._ranks}, passed)
            if self._seconds is None or self._end_silent(silent):
                continue
            if all(self._records.has_finished(rank) for rank in self._ranks):
                finished_seconds += passed
                if finished_seconds >= self._seconds:
                    self._end_held(finished_seconds)
                continue
            stuck_seconds = stall.update(list(states.values()), passed)
            if stuck_seconds is not None:
                self._end_stuck(stuck_seconds)

    def _wait_for(self, rank: int, process: int) -> None:
        self._ends.put((rank, _exit_code(process)))

    def _has_failed(self, rank: int, exit_code: int | None) -> bool:
        """Whether a process has ended neither as a run does nor by the decision of a user's program."""
        return exit_code not in (None, *ENDS) or not self._records.accounts_for(rank, exit_code)

    def _failed_first(self, rank: int, exit_code: int | None) -> None:
        """Record the first failed process and collect the stacks of the others. If it has left with exit code 0,
        torchrun's agent would let the others wait for it, so one of them is killed, after which the agent ends all.
        After a signal of this watch, only its receiver counts, if that had ended before."""
        if self._stopped is not None:
            if rank != self._stopped[0] or exit_code == -signal.SIGKILL:
                return
            if exit_code is not None:
                self._stopped = None
        self.first_end = rank, time.time()
        others = [other for other in self._ranks if other != rank]
        self._records.collect(others)
        if exit_code in (0, None):
            for other in [each for each in others if self._records.process(each) is not None][:1]:
                self._kill(other)

    def _end_held(self, seconds: float) -> None:
        """Kill the processes that something, such as a thread, keeps from ending after the run."""
        if self.held:
            return
        self._records.collect(self._ranks)
        for rank in self._ranks:
            if self._records.process(rank) is not None:
                self.held.add(rank)
                location = self._records.location(rank, of_main_thread=False)
                sys.stderr.write(
                    f"warning: rank {rank} has not ended for {seconds:.0f} s after its run"
                    f"{f'; it is in {location}' if location else ''}; it was killed, and the run is complete\n"
                )
        for rank in self.held:
            self._kill(rank)

    def _end_silent(self, silent: tuple[int, float] | None) -> bool:
        """Kill the process that gave no sign of life for too long, if it lives; returns whether it was killed."""
        if silent is None or self._seconds is None or silent[1] < self._seconds or self._stopped is not None:
            return False
        rank, seconds = silent
        process = self._records.process(rank)
        if process is None:
            return False
        how = "is stopped" if process_state(process) in ("T", "t") else "does not run"
        self._stopped = rank, f"{how}: no sign of life for {seconds:.0f} s"
        self._records.collect(other for other in self._ranks if other != rank)
        self._kill(rank)
        return True

    def _end_stuck(self, seconds: float) -> None:
        """Kill the process that the others wait for, which is the one that does not wait. torchrun's agent ends the
        others. If all wait for each other, the first is killed, unless a process of another node may be the cause."""
        if self._stopped is not None:
            return
        self._records.collect(self._ranks)
        busy = [rank for rank in self._ranks if not self._records.waits(rank)]
        if not busy and not self._is_alone:
            return
        rank = busy[0] if busy else self._ranks[0]
        how = "is stuck" if busy else "and all others wait for each other"
        location = self._records.location(rank)
        self._stopped = rank, f"{how}: no progress for {seconds:.0f} s{f'; it is in {location}' if location else ''}"
        self._kill(rank)

    def _kill(self, rank: int) -> None:
        process = self._records.process(rank)
        if process is not None:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _exit_code(process: int) -> int | None:
    """Wait for the end of a child without reaping it; returns its exit code (negative: a signal), or None if torchrun's
    agent, which polls every 0.2 s, was faster."""
    try:
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    except OSError:
        return None
    return None if ended is None else ended.si_status * (1 if ended.si_code == os.CLD_EXITED else -1)


class Silence:
    """Seconds since the last sign of life of each process."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._last: dict[int, int] = {}

    def longest(self, beats: Mapping[int, int | None], passed: float) -> tuple[int, float] | None:
        """(rank, seconds) of the process that has been silent for the longest time; None: no process has given a sign
        of life."""
        for rank, beat in beats.items():
            if beat is not None:
                self._seconds[rank] = self._seconds.get(rank, 0.0) + passed if self._last.get(rank) == beat else 0.0
                self._last[rank] = beat
        return max(self._seconds.items(), key=lambda entry: entry[1], default=None)


class Stall:
    """Time for which all processes of this node have been in a step in which none makes progress.

    Steps differ, so the limit is the larger of `seconds` and ten times the longest pause since the second step. In the
    first two steps, in which kernels are compiled, and while a process is in the phase data, it is at least ten
    minutes.

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
        """Seconds without progress if they exceed the limit, else None.

        Args:
            states: state that each process wrote last.
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


def cause_of(exit_code: int) -> str:
    """Description of a process's failure, for a sentence."""
    unrecorded = ", and the run recorded neither its end nor a stop" if exit_code in ENDS else ""
    return f"{how_it_ended(exit_code)}{unrecorded}"


def _where(state: Mapping[str, Any]) -> str:
    """Description of a process in parentheses: process, host, iteration and phase."""
    parts = [f"process {state['process']} on {state['host']}" if "process" in state else f"on {socket.gethostname()}"]
    if state.get("iteration") is not None:
        parts.append(f"iteration {state['iteration']}")
    if state.get("phase"):
        parts.append(str(state["phase"]))
    return f" ({', '.join(parts)})"


def error_of(ending: Ending | None, failure: ProcessFailure | None) -> tuple[str, str]:
    """(message, traceback) of a process's error, as `exit_on_user_error` or torch's `record` has left it."""
    if ending is not None or failure is None or not isinstance(failure.message, dict):
        return ("", "") if ending is None else (ending.message, ending.traceback)
    return str(failure.message.get("message", "")), str(failure.message.get("extraInfo", {}).get("py_callstack", ""))


def first_failure(
    failed: Mapping[int, int],
    failures: Mapping[int, ProcessFailure],
    records: ProcessRecords,
    first_end: tuple[int, float] | None,
) -> int:
    """The rank whose process left first without an error, since the others' errors follow from that. Else the rank
    whose error was recorded first, else torchrun's first failure that its agent did not cause."""
    errors = {rank: each.time for rank in failed if (each := records.ending(rank)) is not None and each.message}
    if first_end is not None:
        rank, at = first_end
        is_consequence = failed.get(rank) in (None, -signal.SIGTERM, -signal.SIGABRT)  # the agent's signals, NCCL's
        if rank not in errors and not is_consequence and at < min(errors.values(), default=at) + _SIMULTANEOUS_SECONDS:
            return rank
    if errors:
        return min(errors, key=lambda rank: errors[rank])
    by_themselves = [rank for rank, code in failed.items() if code != -signal.SIGTERM]
    return min(by_themselves or failed, key=lambda rank: failures[rank].timestamp if rank in failures else 0)
