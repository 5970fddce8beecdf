"""A checkpoint with one damaged file: a run refuses it with one error, the same on both ranks, or loads what was saved.

python scripts/drill/corrupt_checkpoint.py --count 200 [--seed 0]

Damages, at random: a file cut short, emptied, deleted, or overwritten with noise for some bytes. Noise may hit bytes
that nothing reads, and the records of the resolved configuration are not needed to resume; such a run has to load the
saved state bit for bit. The tensors' files have no checksums, so noise among their numbers goes unseen: it is counted,
and is no failure. Exits with 1 after another exception, ranks that disagree, or a wrong state otherwise.
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
KINDS = ("cut", "emptied", "deleted", "noise")
OUTCOMES = ("refused", "loaded", "unseen", "wrong")


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
    elif kind == "cut":
        left = generator.randrange(size)
        os.truncate(file, left)
        return f"cut from {size} to {left} bytes"
    else:
        at, length = generator.randrange(size), generator.choice((1, 16, 256))
        with file.open("r+b") as stream:
            stream.seek(at)
            stream.write(generator.randbytes(min(length, size - at)))
        return f"{length} bytes of noise at {at}"
    return kind


def drill(count: int, seed: int, scratch: Path) -> list[str]:
    """Damage `count` copies of a checkpoint, and print a line for each kind of damage; returns the failures."""
    generator = random.Random(seed)
    import_for_ranks()
    pool = RankPool(RANKS, timeout_seconds=60)
    pool.run(runs.train, scratch / "saved", (), 2, (2,))
    whole = pool.run(resume, scratch / "saved")
    files = sorted(path.relative_to(scratch) for path in (scratch / "saved" / "iter_0000002").iterdir())
    outcomes, wrong = Counter(), []
    for index in range(count):
        kind, file = KINDS[index % len(KINDS)], files[index // len(KINDS) % len(files)]
        copy = scratch / "copy"
        shutil.copytree(scratch / "saved", copy)
        description = f"{file.name}: {damage(copy / file.relative_to('saved'), kind, generator)}"
        try:
            results = pool.run(resume, copy)
        except RankError as error:
            wrong.append(f"{description}: another exception, or none in time:\n{error}")
            outcomes[kind, "wrong"] += 1
            pool = RankPool(RANKS, timeout_seconds=60)
            continue
        finally:
            shutil.rmtree(copy)
        refused = [result.startswith("refused: ") for result in results]
        if all(refused) and len(set(results)) == 1:
            outcomes[kind, "refused"] += 1
        elif results == whole:
            outcomes[kind, "loaded"] += 1
        elif kind == "noise" and file.suffix == ".distcp" and not any(refused):
            outcomes[kind, "unseen"] += 1
        else:
            outcomes[kind, "wrong"] += 1
            wrong.append(f"{description}: {[result[:300] for result in results]}")
    pool.close()
    for kind in KINDS:
        print(f"{kind:<8}", *(f"{outcomes[kind, outcome]:>5} {outcome}" for outcome in OUTCOMES))
    return wrong


if __name__ == "__main__":
    sys.exit(run(drill, __doc__, count=200, trials="damaged copies"))
