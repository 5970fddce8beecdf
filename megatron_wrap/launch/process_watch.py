"""What the program that started a run's processes knows of them: which one failed or stopped, where, their stacks."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.parallel.heartbeat import HEARTBEAT, STACKS, STACKS_SIGNAL
from megatron_wrap.platform.base.machine import process_state

FAILURE = "failure.json"
"""Name of the report in the output folder."""
_TICK_SECONDS = 1.0
_STACKS_SECONDS = 0.5
"""That processes have to write their stacks."""
_MAX_STACKS = 200_000
"""Characters of one process's stacks."""


class ProcessWatch:
    """Reads the heartbeats of this node's processes, kills one that has stopped, and reports failures.

    Args:
        folder: in which the processes write.
        ranks: their global ranks.
        report: path of `failure.json`; an earlier one is removed.
        seconds: without a heartbeat after which a process counts as stopped; None: any number.
    """

    def __init__(self, folder: Path, ranks: range, report: Path, seconds: float | None) -> None:
        self._folder, self._ranks, self._report, self._seconds = folder, ranks, report, seconds
        self._stopped: tuple[int, str] | None = None
        self._stacks: dict[int, str] = {}
        self._ends = threading.Event()
        with contextlib.suppress(OSError):
            report.unlink()
        self._thread = threading.Thread(target=self._watch, name="process watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._ends.set()
        self._thread.join()

    def failed(self, exit_codes: Mapping[int, int], first: int, message: str, traceback: str = "") -> str:
        """Write the report of a failure; returns the sentence about it.

        Args:
            exit_codes: global rank -> exit code of each process that did not end with 0; negative: a signal.
            first: the rank that failed first.
            message: of its error; empty if it has left none.
            traceback: of its error; empty for errors without one.
        """
        self.close()
        states = {rank: self._state(rank) or {"rank": rank} for rank in self._ranks}
        cause = f"ended with exit code {exit_codes[first]}"
        if self._stopped is not None:
            first, cause = self._stopped
        elif exit_codes[first] < 0:
            cause = f"was ended by {signal.Signals(-exit_codes[first]).name}"
            if exit_codes[first] == -signal.SIGKILL:
                cause += ", as the kernel does when memory runs out"
        failed = states[first]
        content = {
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **failed,
            "cause": cause,
            "message": message,
            "traceback": traceback,
            "exit_codes": {str(rank): code for rank, code in sorted(exit_codes.items())},
            "processes": list(states.values()),
            "stacks": {str(rank): text for rank, text in sorted(self._stacks.items())},
        }
        written = ""
        with contextlib.suppress(OSError):
            self._report.parent.mkdir(parents=True, exist_ok=True)
            self._report.write_text(hide_secrets(json.dumps(content, indent=1)) + "\n", encoding="utf-8")
            written = f"; {self._report} has the state of all"
        return f"rank {first}{_where(failed)} {cause}{written}"

    def _watch(self) -> None:
        """The time between two looks counts at most twice a tick: this process may have been stopped, too."""
        since: dict[int, float] = {}
        last: dict[int, int] = {}
        before = time.monotonic()
        while not self._ends.wait(_TICK_SECONDS):
            now = time.monotonic()
            passed, before = min(now - before, 2 * _TICK_SECONDS), now
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    beat = (self._folder / HEARTBEAT.format(rank)).stat().st_mtime_ns
                    since[rank] = since.get(rank, 0.0) + passed if last.get(rank) == beat else 0.0
                    last[rank] = beat
            silent = max(since, key=lambda rank: since[rank], default=None)
            if self._seconds is not None and silent is not None and since[silent] >= self._seconds:
                if self._is_alive(silent):
                    self._end(silent, since[silent])
                    return
                since[silent] = 0.0

    def _is_alive(self, rank: int) -> bool:
        process = (self._state(rank) or {}).get("process")
        return isinstance(process, int) and process_state(process) not in ("", "Z", "X")

    def _end(self, rank: int, silent_seconds: float) -> None:
        """Collect the stacks of all processes, and kill the one that has stopped: torchrun's agent ends the others."""
        process = int((self._state(rank) or {})["process"])
        how = "is stopped" if process_state(process) in ("T", "t") else "does not run"
        self._stopped = rank, f"{how}: no sign of life for {silent_seconds:.0f} s"
        for other in self._ranks:
            state = self._state(other)
            if state is not None and other != rank:
                with contextlib.suppress(OSError):
                    os.kill(int(state["process"]), STACKS_SIGNAL)
        time.sleep(_STACKS_SECONDS)
        for other in self._ranks:
            with contextlib.suppress(OSError):
                text = (self._folder / STACKS.format(other)).read_text(encoding="utf-8", errors="replace")
                if text:
                    self._stacks[other] = text[-_MAX_STACKS:]
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)

    def _state(self, rank: int) -> dict[str, Any] | None:
        """What a process last wrote about itself; None: nothing."""
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((self._folder / HEARTBEAT.format(rank)).read_text(encoding="utf-8"))
            return state if isinstance(state, dict) else None
        return None


def _where(state: Mapping[str, Any]) -> str:
    """Process, host, iteration and phase in parentheses."""
    parts = [f"process {state['process']} on {state['host']}" if "process" in state else f"on {socket.gethostname()}"]
    if state.get("iteration") is not None:
        parts.append(f"iteration {state['iteration']}")
    if state.get("phase"):
        parts.append(str(state["phase"]))
    return f" ({', '.join(parts)})"
