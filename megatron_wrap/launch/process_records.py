"""Files that the processes of a run leave for the program that started them: state, stacks, collectives."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.parallel.watch import flight_recorder
from megatron_wrap.parallel.watch.ending import ENDING, INTERRUPTED, RESUME
from megatron_wrap.parallel.watch.heartbeat import COLLECTIVES_REQUEST, HEARTBEAT, STACKS, STACKS_SIGNAL
from megatron_wrap.platform.base.machine import process_state

FLIGHT_RECORDER = "flight_recorder"
"""Folder next to `failure.json`, with the record of each rank."""
_COLLECT_SECONDS, _POLL_SECONDS = 1.5, 0.05
"""Seconds that processes have to write their stacks, and seconds between two looks for them."""
_MAX_STACKS = 200_000
"""Largest number of bytes of a process's stacks."""
_WAITING = (
    *("/torch/distributed/", "/torch/cuda/__init__.py", "/torch/cuda/streams.py", "/megatron/core/pipeline_parallel/"),
    *("/megatron/core/distributed/", "/parallel/collectives.py", "/platform/base/read_on_host.py"),
)
"""Parts of the paths of files in whose functions a process waits for others."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')


ENDS = (0, 2, INTERRUPTED, RESUME)
"""Exit codes of the run's end, a user's error, an interrupt and a stop. They count as these only where
`ProcessRecords.accounts_for` them."""


@dataclass(frozen=True)
class Ending:
    """A process's own record of its end (parallel/watch/ending.py)."""

    exit_code: int | None
    message: str
    traceback: str
    time: float


class ProcessRecords:
    """The files of this node's processes.

    Args:
        folder: folder in which the processes write.
        own_exit_codes: whether the program is a user's, which may end anywhere outside of steps, with any exit code.
    """

    def __init__(self, folder: Path, own_exit_codes: bool = True) -> None:
        self._folder, self._own_exit_codes = folder, own_exit_codes
        self.stacks: dict[int, str] = {}
        """Rank -> stacks of all its threads, filled by `collect`."""
        self.pending: dict[int, list[str]] = {}
        """Rank -> its collectives that have not ended, filled by `collect` where torch recorded them."""

    def state(self, rank: int) -> dict[str, Any] | None:
        """State that a process wrote last; None: it has written none."""
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((self._folder / HEARTBEAT.format(rank)).read_text(encoding="utf-8"))
            return state if isinstance(state, dict) else None
        return None

    def process(self, rank: int) -> int | None:
        """Id of a rank's process that runs or is stopped; None: it has ended, or not yet begun."""
        process = (self.state(rank) or {}).get("process")
        return process if isinstance(process, int) and process_state(process) not in ("", "Z", "X") else None

    def ending(self, rank: int) -> Ending | None:
        """A process's record of its end; None: it has recorded none."""
        file = self._folder / ENDING.format(rank)
        with contextlib.suppress(OSError, ValueError, TypeError):
            if file.is_symlink():
                return Ending(json.loads(os.readlink(file)), "", "", file.lstat().st_mtime)
            return Ending(**json.loads(file.read_text(encoding="utf-8")))
        return None

    def accounts_for(self, rank: int, exit_code: int | None) -> bool:
        """Whether a record explains that a process ended with this code, one of `ENDS`: the run has recorded it, or a
        user's program has ended itself outside of the run's setup, steps, evaluations and saves.

        Args:
            exit_code: None: unknown.
        """
        return self.has_recorded(rank, exit_code) or self.has_own_exit_code(rank)

    def has_recorded(self, rank: int, exit_code: int | None) -> bool:
        """Whether the run has recorded that the process ends with this code; None: with any code."""
        ending = self.ending(rank)
        return ending is not None and ending.exit_code is not None and exit_code in (None, ending.exit_code)

    def has_own_exit_code(self, rank: int) -> bool:
        """Whether the exit code of a process was chosen by a user's program, not by code that its run called."""
        ending = self.ending(rank)
        left_by_exit = ending is not None and ending.exit_code is None
        return self._own_exit_codes and not left_by_exit and not (self.state(rank) or {}).get("inside", False)

    def has_finished(self, rank: int) -> bool:
        """Whether a process has recorded its end, and is not a user's program that may still have work."""
        return not self._own_exit_codes and self.has_recorded(rank, None)

    def beat(self, rank: int) -> int | None:
        """Time of a process's last sign of life in ns; None: it has given none yet, or gives none after its run."""
        if (self.state(rank) or {}).get("closed"):
            return None
        with contextlib.suppress(OSError):
            return (self._folder / HEARTBEAT.format(rank)).stat().st_mtime_ns
        return None

    def collect(self, ranks: Iterable[int]) -> None:
        """Make processes write their stacks and collectives, and read them."""
        with contextlib.suppress(OSError):
            (self._folder / COLLECTIVES_REQUEST).touch()
        asked = {rank: process for rank in ranks if (process := self.process(rank)) is not None}
        before = {rank: self._num_stack_bytes(rank) for rank in asked}
        for process in asked.values():
            with contextlib.suppress(OSError):
                os.kill(process, STACKS_SIGNAL)

        def writes(rank: int) -> bool:
            is_missing = self._num_stack_bytes(rank) == before[rank] or not self._collectives(rank).exists()
            return is_missing and self.process(rank) is not None

        end = time.monotonic() + _COLLECT_SECONDS
        while time.monotonic() < end and any(writes(rank) for rank in asked):
            time.sleep(_POLL_SECONDS)
        time.sleep(_POLL_SECONDS)  # stacks are written line by line
        for rank in asked:
            with contextlib.suppress(OSError), (self._folder / STACKS.format(rank)).open("rb") as file:
                file.seek(before[rank])
                if text := file.read(_MAX_STACKS).decode(errors="replace"):
                    self.stacks[rank] = text
            with contextlib.suppress(OSError, pickle.UnpicklingError):
                self.pending[rank] = flight_recorder.pending(self._collectives(rank).read_bytes())

    def _collectives(self, rank: int) -> Path:
        return self._folder / flight_recorder.FILE.format(rank)

    def _num_stack_bytes(self, rank: int) -> int:
        with contextlib.suppress(OSError):
            return (self._folder / STACKS.format(rank)).stat().st_size
        return 0

    def keep_collectives(self, ranks: Iterable[int], target: Path) -> dict[int, dict[str, Any]]:
        """Copy the flight recorders' files, also those that NCCL's watchdog wrote, into a folder that `torchfrtrace`
        reads.

        Returns:
            Rank -> `file` and `pending`, the collectives that have not ended.
        """
        kept: dict[int, dict[str, Any]] = {}
        for rank in ranks:
            with contextlib.suppress(OSError, pickle.UnpicklingError):
                content = self._collectives(rank).read_bytes()
                target.mkdir(parents=True, exist_ok=True)
                copy = target / f"rank_{rank}"
                shutil.copyfile(self._collectives(rank), copy)
                kept[rank] = {"file": str(copy), "pending": flight_recorder.pending(content)}
        return kept

    def waits(self, rank: int) -> bool:
        """Whether a process waits for others, according to the stacks that `collect` has read."""
        if self.pending.get(rank):
            return True
        innermost = (_FRAME.search(thread) for thread in self.stacks.get(rank, "").split("\n\n"))
        return any(part in frame["file"] for frame in innermost if frame is not None for part in _WAITING)

    def location(self, rank: int, of_main_thread: bool = True) -> str:
        """Position of a process as text: file, line and function outside of Python's own library, else within it; empty
        if it has written no stack.

        Args:
            of_main_thread: False: position of the first thread that is outside of Python's own library; empty if none
                is.
        """
        text = self.stacks.get(rank, "")
        if of_main_thread:
            # a signal to a process is handled by its main thread; stacks of the others, which run on, may be torn
            text = text.partition("Current thread ")[2].partition("\n\n")[0]
        frames = list(_FRAME.finditer(text))
        outside = [frame for frame in frames if not _is_of_python(frame["file"])]
        chosen = outside or (frames if of_main_thread else [])
        return "{file}, line {line}, in {function}".format(**chosen[0].groupdict()) if chosen else ""


def _is_of_python(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(os.path.dirname(os.__file__)) and "-packages" not in file)
