"""SIGSTOP at a random moment of a run on two processes, to one of them or to a data worker: it is named, and all end.

python scripts/drill/stopped_processes.py --count 20 [--jobs 2] [--results FILE] [--seed 0]

Exits with 1 unless the last lines name the rank and the process that was stopped, the launcher ends with exit code 1
within `LIMIT_SECONDS`, and no process of the run is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "end_to_end"))
import _trials
from _launcher import Launcher, children, wait_for

SILENT_SECONDS, LIMIT_SECONDS = 8, 60
OVERRIDES = (
    f"megatron_wrap.init.stopped_process_seconds={SILENT_SECONDS}",
    "megatron_wrap.data.num_workers=1",
    "megatron_lm.train.common.save=null",
)
NAMED = "named"


def trial_in(folder: Path, name: str, seed: int) -> _trials.Result:
    """Stop a process of one run."""
    generator = random.Random(f"{seed} {name}")
    run = Launcher(folder, *OVERRIDES)
    rank, kind = generator.randrange(2), generator.choice(["process", "data worker"])
    victim = run.ranks[rank]
    if kind == "data worker":
        victim = children(victim)[0]
    everyone = [*run.ranks, *(child for process in run.ranks for child in children(process))]
    time.sleep(generator.uniform(0, 3))
    begin = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    code, lines = run.end()
    seconds = time.monotonic() - begin
    expected = [f"rank {rank} (process {run.ranks[rank]} "]
    if kind == "data worker":
        expected.append(f"worker process {victim} of wrap.batches")
    printed = "\n".join(lines[-2:])
    wrong = [f"{words!r} is not in {printed!r}" for words in expected if words not in printed]
    if code != 1:
        wrong.append(f"exit code {code}")
    if seconds > LIMIT_SECONDS:
        wrong.append(f"it took {seconds:.0f} s")
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in everyone), 10)
    if left := [process for process in everyone if Path(f"/proc/{process}").exists()]:
        wrong.append(f"{len(left)} processes are left")
    outcome = _trials.WRONG if wrong else NAMED
    return {"kind": kind, "outcome": outcome, "detail": "; ".join(wrong), "ended_after": round(seconds, 1)}


@contextlib.contextmanager
def worker(folder: Path, seed: int) -> Iterator[Callable[[str], _trials.Result]]:
    """Performs trials in the folder."""

    def trial(name: str) -> _trials.Result:
        shutil.rmtree(folder / "run", ignore_errors=True)
        (folder / "run").mkdir()
        return trial_in(folder / "run", name, seed)

    yield trial


if __name__ == "__main__":
    sys.exit(_trials.main(__doc__ or "", "runs, each with one stopped process", worker, [NAMED], count=20))
