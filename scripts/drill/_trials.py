"""Random trials in parallel processes. Each result is a line of a file, so that a drill continues where it stopped."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_wrap.utils.pools.processes import end_with_parent

WRONG = "wrong"
"""Outcome of a failed trial."""
Result = dict[str, Any]
"""Result of a trial: `kind` (its row of the table), `outcome` (its column), and further records."""
Worker = Callable[[Path], contextlib.AbstractContextManager[Callable[[str], Result]]]
"""Function of a folder that makes, in its own process, the function that performs the trial of a name."""


def parser(description: str, count: int, trials: str) -> argparse.ArgumentParser:
    """Options that every drill of this kind has.

    Args:
        count: default of --count, the number of `trials`.
    """
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--count", type=int, default=count, help=trials)
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--jobs", type=int, default=1, help="trials at the same time, each in a folder of its own")
    result.add_argument("--results", type=Path, help="JSON lines: trials in it are not repeated, new ones are appended")
    result.add_argument("--minutes", type=float, help="begin no trial after this time")
    return result


def run(arguments: argparse.Namespace, names: Sequence[str], worker: Worker, scratch: Path) -> list[Result]:
    """Perform the trials that the file of results does not have; returns all results of `names`.

    Args:
        names: names of the trials; a name and the seed together determine a trial.
        scratch: folder for the files of this call.
    """
    file = (arguments.results or scratch / "results.jsonl").absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    done = _results(file, arguments.seed)
    missing = [name for name in names if name not in done]
    if len(missing) < len(names):
        print(f"{len(names) - len(missing)} of {len(names)} trials are in {file}", flush=True)
    context = multiprocessing.get_context("fork")
    counter = context.Value("i", 0)
    end = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    processes = []
    for number in range(min(arguments.jobs, len(missing))):
        folder = scratch / f"job{number}"
        folder.mkdir()
        job = (missing, counter, end, worker, folder, file, arguments.seed)
        processes.append(context.Process(target=_work, args=job, daemon=False))
        processes[-1].start()
    for process in processes:
        process.join()
    done = _results(file, arguments.seed)
    failed = [number for number, process in enumerate(processes) if process.exitcode != 0]
    for number in failed:
        print(f"WRONG: job {number} ended with {processes[number].exitcode}: {_tail(scratch / f'job{number}')}")
    if not failed and len(done.keys() & set(names)) < len(names):
        print(f"{len(names) - len(done.keys() & set(names))} trials are left; the same command continues")
    return [done[name] for name in names if name in done] + [{"outcome": WRONG, "kind": "job"} for _ in failed]


def _work(
    missing: Sequence[str], counter: Any, end: float, worker: Worker, folder: Path, file: Path, seed: int
) -> None:
    """Perform trials until none is left, or until the drill has ended."""
    end_with_parent(signal.SIGKILL)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    with worker(folder) as trial:
        while time.monotonic() < end:
            with counter.get_lock():
                index = counter.value
                counter.value += 1
            if index >= len(missing):
                break
            begin = time.monotonic()
            try:
                result = trial(missing[index])
            except Exception:
                result = {"kind": "drill", "outcome": WRONG, "detail": traceback.format_exc()}
            result = {"seed": seed, "trial": missing[index], **result, "seconds": round(time.monotonic() - begin, 3)}
            with file.open("a", encoding="utf-8") as stream:  # one write, which appends whole
                stream.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def _results(file: Path, seed: int) -> dict[str, Result]:
    """Trial -> result, for this seed."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    results = []
    for line in lines:
        with contextlib.suppress(ValueError):  # cut by a kill: repeated
            results.append(json.loads(line))
    return {result["trial"]: result for result in results if result["seed"] == seed}


def _tail(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "log").read_text(encoding="utf-8", errors="replace")[-3000:]
    return ""


def report(results: Sequence[Result], outcomes: Sequence[str]) -> int:
    """Print a table of kinds and outcomes, and the wrong trials; returns the exit status."""
    counts = Counter((result["kind"], result["outcome"]) for result in results)
    kinds = sorted({result["kind"] for result in results})
    columns = [*outcomes, WRONG]
    width = max([len(kind) for kind in kinds] + [5])
    print(f"{'':<{width}}", *(f"{column:>10}" for column in columns))
    for kind in kinds:
        print(f"{kind:<{width}}", *(f"{counts[kind, column]:>10}" for column in columns))
    totals = [sum(counts[kind, column] for kind in kinds) for column in columns]
    print(f"{'all':<{width}}", *(f"{total:>10}" for total in totals))
    for result in results:
        if result["outcome"] == WRONG:
            print(f"WRONG: {result.get('trial', '')}: {result.get('detail', '')}")
    return 1 if totals[-1] else 0


def in_scratch(main: Callable[[Path], int]) -> int:
    """Call `main` with a folder that is removed afterwards, on the disk of TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="drill-") as scratch:
        return main(Path(scratch))


def main(
    description: str,
    trials: str,
    worker: Callable[[Path, int], contextlib.AbstractContextManager[Callable[[str], Result]]],
    outcomes: Sequence[str],
    names: Sequence[str] | None = None,
    count: int = 0,
) -> int:
    """The command of a drill: performs `--count` trials, prints their table and returns the exit status.

    Args:
        trials: the option's help.
        worker: a `Worker` that is also given the seed.
        names: names of all trials; None: "trial 0", "trial 1" and so on.
        count: default of --count; 0: all `names`.
    """
    arguments = parser(description, count or len(names or ()), trials).parse_args()
    chosen = names or [f"trial {number}" for number in range(arguments.count)]

    def perform(scratch: Path) -> int:
        results = run(arguments, chosen[: arguments.count], lambda folder: worker(folder, arguments.seed), scratch)
        if seconds := [result["ended_after"] for result in results if "ended_after" in result]:
            print(f"ended after {min(seconds)} to {max(seconds)} s")
        return report(results, outcomes)

    return in_scratch(perform)
