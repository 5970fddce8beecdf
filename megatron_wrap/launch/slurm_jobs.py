"""The jobs of Slurm that `megatron-wrap` submitted: their record, their state, and their console."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.errors import PlatformError
from megatron_wrap.hidden_secrets import without_secrets
from megatron_wrap.launch.contract import show_from
from megatron_wrap.parallel.watch.ending import RESUME
from megatron_wrap.utils.atomic_write import write_atomically

_STATE_SECONDS = 3.0
"""Seconds between two queries of Slurm's controller while a job is followed."""
_FOLLOW_SECONDS = 0.3
_TAIL_BYTES = 2**16
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("TIMEOUT", "STOPPED"),
}
"""Slurm's states of a job that is not started again; STOPPED is ours: the run saved, and was not queued again."""
UNKNOWN = "UNKNOWN"
"""State of a job that Slurm has forgotten and that has left no exit code."""


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job as it is recorded."""

    id: str
    name: str
    output: str
    """The run's output folder."""
    command: tuple[str, ...]
    """Arguments of `megatron-wrap` without those of the launcher."""

    @property
    def logs(self) -> list[Path]:
        """The log files of the job's script and of its nodes; the first may not exist yet."""
        folder = Path(self.output, "logs")
        of_nodes = sorted(folder.glob(f"slurm-{self.id}-node*.log"), key=lambda file: (len(file.name), file.name))
        return [folder / f"slurm-{self.id}.log", *of_nodes]


@dataclass(frozen=True)
class JobState:
    """State of a job, from Slurm and the run's files."""

    name: str
    """Slurm's state, such as PENDING."""
    reason: str = ""
    """Slurm's reason why the job is pending; empty in other states."""
    exit_code: int | None = None
    """Exit code of a run that ended by itself; None: it has not, or it is not known."""


def slurm(*command: str) -> str:
    """The output of one of Slurm's commands.

    Raises:
        PlatformError: the command is not installed, or fails; the message is Slurm's.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PlatformError(f"{command[0]} is not installed here; run this where Slurm's commands are") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise PlatformError(f"{command[0]} fails: {'; '.join(lines) or f'exit code {done.returncode}'}")
    return done.stdout


# ---- the record ----


def remember(job: SubmittedJob) -> None:
    """Record a job that was submitted, for `submitted_jobs`."""
    folder = _records()
    folder.mkdir(parents=True, exist_ok=True)
    content = without_secrets({**asdict(job), "command": list(job.command)})
    write_atomically(folder / f"{job.id}.json", json.dumps(content) + "\n")


def submitted_jobs() -> list[SubmittedJob]:
    """The recorded jobs, oldest first."""
    jobs = []
    for file in sorted(_records().glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(file.read_text(encoding="utf-8"))
            jobs.append(SubmittedJob(**{**content, "command": tuple(content["command"])}))
    return jobs


def _records() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "megatron-wrap", "slurm-jobs")


# ---- the state ----


def states(jobs: Iterable[SubmittedJob]) -> dict[str, JobState]:
    """Id -> state of each job, from squeue and the exit code that the job has left.

    Raises:
        PlatformError: Slurm's controller does not answer.
    """
    listed: dict[str, JobState] = {}
    for line in slurm("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r").splitlines():
        identity, name, reason = line.split("|", 2)
        listed[identity] = JobState(name, "" if reason == "None" or name != "PENDING" else reason)
    return {job.id: _with_exit_code(listed.get(job.id, JobState(UNKNOWN)), _exit_code(job)) for job in jobs}


def _with_exit_code(state: JobState, code: int | None) -> JobState:
    if code is None or state.name not in (*ENDED, UNKNOWN):
        return state
    name = {0: "COMPLETED", RESUME: "STOPPED"}.get(code, "FAILED")
    return JobState("CANCELLED" if state.name == "CANCELLED" else name, "", code)


def _exit_code(job: SubmittedJob) -> int | None:
    """Exit code of the job's script; None while it runs or if Slurm ended it."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(job.output, "slurm", f"{job.id}.exit").read_text(encoding="utf-8"))
    return None


def last_step(job: SubmittedJob) -> dict[str, Any]:
    """The metrics of the run's last step; empty before the first."""
    for line in reversed(_tail(Path(job.output, "metrics.jsonl")).splitlines()):
        with contextlib.suppress(ValueError):
            metrics = json.loads(line)
            if isinstance(metrics, dict) and "elapsed_time" in metrics:
                return metrics
    return {}


def last_error(job: SubmittedJob) -> str:
    """The last line about an error that the job's script printed; empty: there is none."""
    errors = re.findall(r"^(?:.*slurm job \d+: |slurmstepd: )?(error: .*)$", _tail(job.logs[0]), re.MULTILINE)
    return errors[-1] if errors else ""


def _tail(file: Path) -> str:
    with contextlib.suppress(OSError), file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return stream.read().decode(errors="replace")
    return ""


# ---- the console ----


def follow(job: SubmittedJob) -> int:
    """Show the output of a job and its nodes until the job ends, also while it is queued again; returns the run's exit
    code, 1 for a job that Slurm ended.

    Raises:
        PlatformError: Slurm's controller does not answer. KeyboardInterrupt: Ctrl-C; the job continues.
    """
    shown: dict[Path, int] = {}
    state, asked = JobState(""), 0.0
    try:
        while state.name not in (*ENDED, UNKNOWN):
            if time.monotonic() - asked >= _STATE_SECONDS:
                before, asked = state, time.monotonic()
                state = states([job])[job.id]
                if state.name == "PENDING" and state != before:
                    because = f": {state.reason}" if state.reason else ""
                    sys.stderr.write(f"job {job.id} waits in the queue{because}\n")
            shown |= {file: show_from(file, shown.get(file, 0)) for file in job.logs}
            time.sleep(_FOLLOW_SECONDS)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"job {job.id} continues; megatron-wrap jobs --follow {job.id} follows it, --cancel {job.id} stops it"
        ) from None
    for file in job.logs:
        show_from(file, shown.get(file, 0))
    if state.exit_code is not None:
        return state.exit_code
    sys.stderr.write(f"error: job {job.id} has ended: {state.name}; its logs: {job.logs[0]}\n")
    return 1
