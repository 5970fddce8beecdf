"""SIGKILL at many moments of a save, writer processes included: each time, the run resumes with a saved state.

python scripts/drill/kill_during_save.py --count 30 [--async-save]

Three in four kills come at an event of Python around which the disk changes, spread over all events of a save; the
others some milliseconds into a save. Exits with 1 if a resumed state was never saved, or if few lives ended in a save.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
from _checkpoint_runs import samples, started, state_digest

from megatron_wrap.checkpoint.store import CheckpointStore
from megatron_wrap.testing.pools import import_for_ranks

EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.fork", "os.listdir", "os.scandir")
"""Audit events of Python around which the disk changes; each is a moment to die at."""


class _Moments:
    """Counts audit events while armed and ends the whole process group at the chosen one."""

    def __init__(self, fatal: int | None) -> None:
        self.armed, self.seen, self.fatal = False, 0, fatal
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: object) -> None:
        if self.armed and event in EVENTS:
            self.seen += 1
            if self.seen == self.fatal:
                os.killpg(0, signal.SIGKILL)


def _life(folder: Path, journal: Path, asynchronous: bool, fatal: int | None, ready: Path | None) -> None:
    """Resume, take one step, save; the journal records the state's digest at the start and before the save."""
    moments = _Moments(fatal)
    with started(folder, ("megatron_wrap.checkpoint.async_save=true",) if asynchronous else ()) as wrap:
        with journal.open("a") as lines:
            print("resumed", wrap.iteration, state_digest(wrap), file=lines)
            data = samples()
            wrap.train(data[:4])
            print("saves", wrap.iteration, state_digest(wrap), file=lines)
        if ready is not None:
            ready.touch()
        moments.armed = True
        wrap.save()
        moments.armed = asynchronous  # the end waits for the save
    moments.armed = False
    with journal.open("a") as lines:
        print("events", moments.seen, "-", file=lines)


def _live(
    folder: Path, journal: Path, asynchronous: bool, fatal: int | None = None, seconds: float | None = None
) -> int:
    """One life in its own process group, killed at an event or some seconds into its save; returns its wait status."""
    ready = folder.parent / "ready" if seconds is not None else None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            _life(folder, journal, asynchronous, fatal, ready)
            status = 0
        finally:
            os._exit(status)
    if ready is not None:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        ready.unlink()
        time.sleep(seconds or 0.0)
        os.killpg(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _entries(journal: Path, kind: str) -> list[tuple[int, str]]:
    lines = (line.split() for line in journal.read_text().splitlines())
    return [(int(number), digest) for word, number, digest in lines if word == kind]


def drill(count: int, scratch: Path, asynchronous: bool) -> list[str]:
    """Kill `count` saves, and print a line with the result; returns the failures."""
    import_for_ranks()
    folder, journal = scratch / "checkpoints", scratch / "journal"
    if _live(folder, journal, asynchronous) != 0:
        return ["a life that was not killed failed"]
    [(events, _)] = _entries(journal, "events")
    timed = count // 4
    moments = [1 + index * (events - 1) // max(count - timed - 1, 1) for index in range(count - timed)]
    longest = 3.0 if asynchronous else 0.18
    lives = [{"fatal": moment} for moment in moments] + [{"seconds": longest * i / timed} for i in range(timed)]
    killed, wrong = 0, []
    for life in lives:
        killed += os.WIFSIGNALED(_live(folder, journal, asynchronous, **life))
        if CheckpointStore(folder).latest() is None:
            wrong.append(f"{life}: the folder has no checkpoint")
    if _live(folder, journal, asynchronous) != 0:
        wrong.append("the last life, which was not killed, failed")
    if killed < count * 2 / 3:
        wrong.append(f"only {killed} of {count} lives ended in a save")
    expected = dict(_entries(journal, "saves"))
    resumed = _entries(journal, "resumed")[1:]  # the first life had nothing to resume from
    if len(resumed) != count + 1:
        wrong.append(f"{len(resumed)} of {count + 1} lives resumed")
    if any(iteration < 1 for iteration, _ in resumed):
        wrong.append("a life did not resume")
    wrong += [f"iteration {at} resumed with another state" for at, digest in resumed if digest != expected.get(at)]
    wrong += [f"{path.name} was left" for path in folder.iterdir() if path.name.startswith(".iter_")]
    print(f"{count} lives, {killed} killed in a save of {events} events, {len(resumed)} resumed")
    return wrong


def main() -> int:
    """Returns 0 if each life resumed a saved state, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30, help="lives to kill")
    parser.add_argument("--async-save", action="store_true", help="asynchronous saves, killed until the end of the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wrong = drill(arguments.count, Path(scratch), arguments.async_save)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
