"""SIGKILL at any moment of a save, writer processes included, leaves a folder that resumes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from _checkpoint_runs import samples, started, state_digest, warm_up

from megatron_wrap.checkpoint import CheckpointStore

EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.fork", "os.listdir", "os.scandir")
"""Audit events of Python around which the disk changes: each of them is a moment to die at."""


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


def _life(folder: Path, journal: Path, fatal: int | None, ready: Path | None) -> None:
    """Resume, take one step, save; the journal gets the state's digest at the start and before the save."""
    moments = _Moments(fatal)
    with started(folder) as wrap:
        with journal.open("a") as lines:
            print("resumed", wrap.iteration, state_digest(wrap), file=lines)
            data = samples()
            wrap.train(data[:4])
            print("saves", wrap.iteration, state_digest(wrap), file=lines)
        if ready is not None:
            ready.touch()
        moments.armed = True
        wrap.save()
        moments.armed = False
    with journal.open("a") as lines:
        print("events", moments.seen, "-", file=lines)


def _live(folder: Path, journal: Path, fatal: int | None = None, seconds: float | None = None) -> int:
    """One life in a process group of its own, killed at an event or some seconds into its save; its wait status."""
    ready = folder.parent / "ready" if seconds is not None else None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            _life(folder, journal, fatal, ready)
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


def test_sigkill_at_many_moments_of_a_save(tmp_path: Path) -> None:
    warm_up()
    folder, journal = tmp_path / "checkpoints", tmp_path / "journal"
    began = time.monotonic()
    assert _live(folder, journal) == 0
    duration = time.monotonic() - began
    events = _entries(journal, "events")[0][0]
    moments = sorted({1 + place * (events - 1) // 23 for place in range(24)})
    assert len(moments) >= 20
    killed = 0
    for moment in moments:
        killed += os.WIFSIGNALED(_live(folder, journal, fatal=moment))
        assert CheckpointStore(folder).latest() is not None
    for place in range(6):
        killed += os.WIFSIGNALED(_live(folder, journal, seconds=place * 0.03))
        assert CheckpointStore(folder).latest() is not None
    assert killed >= 20, f"{killed} of {len(moments) + 6} lives ended in a save ({events} events, {duration:.1f} s)"
    assert _live(folder, journal) == 0
    expected = dict(_entries(journal, "saves"))
    resumed = _entries(journal, "resumed")[1:]  # the first life had nothing to resume from
    assert len(resumed) == len(moments) + 7
    assert all(iteration >= 1 for iteration, _ in resumed)
    assert all(digest == expected[iteration] for iteration, digest in resumed)
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".iter_")]
    assert hidden == []
