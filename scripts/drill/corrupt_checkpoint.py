"""The newest of two checkpoints is damaged: a run finds it before the first step, and resumes the one before it.

python scripts/drill/corrupt_checkpoint.py --count 200 [--clean 40] [--jobs 4] [--results FILE] [--seed 0]

Two processes save two checkpoints, plain and asynchronously. A trial copies them (hard links, and new files for what is
damaged), and starts a run of two processes on the copy. Damages: a bit, noise, zeros, a file cut short, emptied,
longer, deleted, exchanged with another one, or that of the checkpoint before, half of them in tensor files, half in
small ones; and trackers with garbage or an old iteration. Each changes the content. `--clean` starts runs on whole
copies.

Exits with 1 after another exception, processes that disagree, a damage that is not detected (the folder must be
renamed), a whole checkpoint that is refused, or a state that is not, bit for bit, the one of the checkpoint before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _checkpoint_runs as runs
import _trials
from _rank_pools import RankPools

from megatron_wrap.testing.ranks import RankError, RankPool, import_for_ranks

RANKS, LIMIT_SECONDS = 2, 60
KINDS = ("bit", "noise", "zeros", "cut", "emptied", "longer", "deleted", "exchanged", "old file", "tracker")
SAVES = {"plain": (), "asynchronous": ("megatron_wrap.checkpoint.async_save=true",)}
TRACKER, NEWEST, BEFORE = "latest_checkpointed_iteration.txt", "iter_0000002", "iter_0000001"
TRACKERS = (b"", b"7", b"x" * 64, b"\xff\xfe", b"-1", b"2" * 400, b"release", b"0000002x", b"1")
"""Contents of damaged trackers. The last one is an old iteration, as if it had been set back by hand."""
_LOCKED = shutil.ignore_patterns(".run.lock")
States = dict[str, list[Any]]
"""Checkpoint -> its digest on each process."""


def resume(folder: Path) -> str:
    """Resume the run; returns iteration and digest of the state, or the message of the refusal."""
    from megatron_wrap.errors import CheckpointError

    try:
        with runs.started(folder) as wrap:
            return f"state {wrap.iteration} {runs.state_digest(wrap)}"
    except CheckpointError as error:
        return f"refused: {error}"


def saved(scratch: Path) -> dict[str, States]:
    """Save the checkpoints into a folder for each of `SAVES`; returns their states."""
    pool = RankPool(RANKS, timeout_seconds=LIMIT_SECONDS)
    states = {}
    for name, overrides in SAVES.items():
        pool.run(runs.train, scratch / name, overrides, 2, (1, 2))
        shutil.rmtree(scratch / name / "records")
        states[name] = {NEWEST: pool.run(resume, _copy(scratch / name, scratch / "copy"))}
        shutil.rmtree(scratch / "copy" / NEWEST)
        states[name][BEFORE] = pool.run(resume, scratch / "copy")
        shutil.rmtree(scratch / "copy")
    pool.close()
    return states


def _copy(source: Path, target: Path) -> Path:
    """Copy a folder with hard links, without the file that a run locks."""
    return Path(shutil.copytree(source, target, ignore=_LOCKED, copy_function=os.link))


def damage(checkpoint: Path, kind: str, tensors: bool, generator: random.Random) -> str:
    """Damage a file of the checkpoint; returns a description."""
    while True:
        files = [path for path in sorted(checkpoint.iterdir()) if (path.suffix == ".distcp") == tensors]
        file = generator.choice(files)
        before, description = file.read_bytes(), kind
        after: bytes | None = None
        at, length = generator.randrange(len(before)), generator.choice((1, 16, 256, 4096))
        if kind == "bit":
            after = before[:at] + bytes([before[at] ^ (1 << generator.randrange(8))]) + before[at + 1 :]
        elif kind in ("noise", "zeros"):
            length = min(length, len(before) - at)
            after = before[:at] + (generator.randbytes(length) if kind == "noise" else bytes(length))
            after += before[at + length :]
        elif kind == "cut":
            after = before[:at]
        elif kind == "emptied":
            after = b""
        elif kind == "longer":
            after = before + generator.randbytes(length)
        elif kind == "old file":
            after = (checkpoint.parent / BEFORE / file.name).read_bytes()
        elif kind == "exchanged":
            other = generator.choice([path for path in sorted(checkpoint.iterdir()) if path != file])
            after, description = other.read_bytes(), f"exchanged with {other.name}"
            if after != before:
                _replace(other, before)
        if after == before:  # noise may have the old value, and two files the same content
            continue
        _replace(file, after)
        return f"{file.name}: {description}, {len(before)} bytes, at {at}"


def _replace(file: Path, content: bytes | None) -> None:
    """Write a new file, so that the hard links of the old one keep its content; None: no file."""
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)


@contextlib.contextmanager
def worker(source: Path, states: dict[str, States], seed: int, folder: Path) -> Iterator[Callable[[str], Any]]:
    """Performs trials with processes that are started once, and again after one that failed."""
    with RankPools() as pools:
        yield lambda name: _trial(name, source, states, random.Random(f"{seed} {name}"), folder / "copy", pools)


def _trial(
    name: str, source: Path, states: dict[str, States], generator: random.Random, copy: Path, pools: RankPools
) -> dict[str, str]:
    number = int(name.split()[1])
    how = list(SAVES)[number // (2 * len(KINDS)) % len(SAVES)]
    _copy(source / how, copy)
    kind, expected, good, description = "clean", NEWEST, "loaded", "whole"
    if name.startswith("corruption"):
        kind, good = KINDS[number % len(KINDS)], "detected"
        if kind == "tracker":
            text = generator.choice(TRACKERS)
            _replace(copy / TRACKER, text)
            expected, good, description = BEFORE if text == b"1" else NEWEST, "recovered", f"tracker: {text[:8]!r}"
        else:
            expected, tensors = BEFORE, number // len(KINDS) % 2 == 0
            description = damage(copy / NEWEST, kind, tensors, generator)
    try:
        with pools.of(RANKS) as pool:
            results = pool.run(resume, copy)
        set_aside = [path.name for path in copy.glob("iter_*.damaged-*")]
    except RankError as error:
        results, set_aside = [str(error)], []
    finally:
        shutil.rmtree(copy)
    right = results == states[how][expected] and len(set_aside) == (good == "detected")
    detail = description if right else f"{description}: {[text[-2000:] for text in results]}, set aside: {set_aside}"
    return {"kind": kind, "outcome": good if right else _trials.WRONG, "save": how, "detail": detail}


def drill(arguments: argparse.Namespace, scratch: Path) -> int:
    """Perform the trials; returns the exit status."""
    import_for_ranks()
    states = saved(scratch)
    names = [f"corruption {index}" for index in range(arguments.count)]
    names += [f"clean {index}" for index in range(arguments.clean)]
    results = _trials.run(arguments, names, partial(worker, scratch, states, arguments.seed), scratch)
    return _trials.report(results, ("detected", "recovered", "loaded"))


def main() -> int:
    """Run the drill; returns 0 if all damages were detected, and all whole checkpoints loaded."""
    parser = _trials.parser(__doc__ or "", 200, "damaged copies")
    parser.add_argument("--clean", type=int, default=0, help="loads of whole copies")
    arguments = parser.parse_args()
    return _trials.in_scratch(partial(drill, arguments))


if __name__ == "__main__":
    sys.exit(main())
