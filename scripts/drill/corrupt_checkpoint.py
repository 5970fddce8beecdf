"""The newest of two checkpoints with one damaged file: a run says so and resumes from the one before it, bit for bit.

python scripts/drill/corrupt_checkpoint.py --count 200 [--seed 0]

Damages, at random: a file cut short, emptied, deleted, replaced by another one, overwritten with noise for some bytes,
or with one bit flipped; and a tracker of garbage. Exits with 1 after another exception, ranks that disagree, a damage
that is not detected, or a state other than that of the checkpoint before.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _checkpoint_runs as runs
from _counted import run

from megatron_wrap.testing.pools import import_for_ranks
from megatron_wrap.testing.ranks import RankError, RankPool

RANKS = 2
KINDS = ("cut", "emptied", "deleted", "replaced", "noise", "bit")
OUTCOMES = ("detected", "unchanged", "wrong")
TRACKERS = (b"", b"7", b"x" * 64, b"\xff\xfe", b"-1", b"2" * 400)


def resume(folder: Path) -> str:
    """The digest of the resumed state, or the message of the refusal."""
    from megatron_wrap.errors import CheckpointError

    try:
        with runs.started(folder) as wrap:
            return f"state {wrap.iteration} {runs.state_digest(wrap)}"
    except CheckpointError as error:
        return f"refused: {error}"


def damage(file: Path, kind: str, generator: random.Random) -> str:
    """Damage the file; returns a description."""
    size = file.stat().st_size
    if kind == "deleted":
        file.unlink()
    elif kind == "emptied":
        os.truncate(file, 0)
    elif kind == "replaced":
        other = generator.choice([path for path in sorted(file.parent.iterdir()) if path != file])
        shutil.copyfile(other, file)
        return f"replaced by {other.name}"
    elif kind == "cut":
        left = generator.randrange(size)
        os.truncate(file, left)
        return f"cut from {size} to {left} bytes"
    else:
        at, length = generator.randrange(size), generator.choice((1, 16, 256))
        with file.open("r+b") as stream:
            stream.seek(at)
            noise = generator.randbytes(min(length, size - at))
            if kind == "bit":
                noise = bytes([stream.read(1)[0] ^ (1 << generator.randrange(8))])
                stream.seek(at)
            stream.write(noise)
        return f"{len(noise)} bytes of {kind} at {at}"
    return kind


def drill(count: int, seed: int, scratch: Path) -> list[str]:
    """Damage `count` copies of two checkpoints, and print a line for each kind of damage; returns the failures."""
    generator = random.Random(seed)
    import_for_ranks()
    pool = RankPool(RANKS, timeout_seconds=60)
    pool.run(runs.train, scratch / "saved", (), 2, (1, 2))
    newest = pool.run(resume, scratch / "saved")
    shutil.copytree(scratch / "saved", scratch / "first")
    shutil.rmtree(scratch / "first" / "iter_0000002")
    (scratch / "first" / "latest_checkpointed_iteration.txt").write_text("1")
    before = pool.run(resume, scratch / "first")
    files = sorted(path.relative_to(scratch) for path in (scratch / "saved" / "iter_0000002").iterdir())
    outcomes, wrong = Counter(), []
    for index in range(count):
        copy = scratch / "copy"
        shutil.copytree(scratch / "saved", copy)
        expected, kind = before, "tracker"
        if index % (len(KINDS) + 1) < len(KINDS):
            kind, file = KINDS[index % (len(KINDS) + 1)], files[index // (len(KINDS) + 1) % len(files)]
            damaged = copy / file.relative_to("saved")
            content = damaged.read_bytes()
            description = f"{file.name}: {damage(damaged, kind, generator)}"
            if damaged.exists() and damaged.read_bytes() == content:
                expected = newest  # noise may have the old value, and two files the same content
        else:  # the checkpoints themselves are whole
            expected, text = newest, generator.choice(TRACKERS)
            (copy / "latest_checkpointed_iteration.txt").write_bytes(text)
            description = f"tracker: {text[:8]!r}"
        try:
            results = pool.run(resume, copy)
        except RankError as error:
            wrong.append(f"{description}: another exception, or none in time:\n{error}")
            outcomes[kind, "wrong"] += 1
            pool = RankPool(RANKS, timeout_seconds=60)
            continue
        finally:
            shutil.rmtree(copy)
        if results == expected:
            outcomes[kind, "unchanged" if expected is newest else "detected"] += 1
        else:
            outcomes[kind, "wrong"] += 1
            wrong.append(f"{description}: {[result[:300] for result in results]}")
    pool.close()
    for kind in (*KINDS, "tracker"):
        print(f"{kind:<8}", *(f"{outcomes[kind, outcome]:>5} {outcome}" for outcome in OUTCOMES))
    return wrong


if __name__ == "__main__":
    sys.exit(run(drill, __doc__, count=200, trials="damaged copies"))
