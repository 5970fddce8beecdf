"""SIGKILL for a worker of Ray Train at random moments: the run is restarted, and ends as one without kills.

python scripts/drill/ray_kills.py --count 20 [--jobs 1] [--results FILE] [--seed 0] [--minutes M]

Each trial is a run of two gloo workers that saves every third of twelve steps. One of the two kills itself up to a
second after a random step. Exits with 1 unless every step has the samples, the loss and the gradient norm of the run
on two ranks without Ray, bit for bit.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _checkpoint_runs
import _ray_runs as runs
import _trials

STEPS = 12


@contextlib.contextmanager
def worker(folder: Path, seed: int) -> Iterator[object]:
    """Start a cluster for this job, and train the run without kills."""
    _checkpoint_runs.in_new_processes(2, runs.without_ray, folder / "unbroken", STEPS)
    unbroken = runs.steps_of(folder / "unbroken" / "journal")
    warnings.simplefilter("ignore")
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)

    def trial(name: str) -> _trials.Result:
        from megatron_wrap.launch.ray import trainer

        chance = random.Random(f"{seed} {name}")
        rank, step, seconds = chance.randrange(2), chance.randrange(1, STEPS), chance.random()
        home = folder / name
        home.mkdir()
        loop = runs.RayLoop(home / "journal", rank, step, seconds)
        trainer(runs.CONFIG, runs.overrides(home, STEPS), loop=loop, num_workers=2).fit()
        lines = len((home / "journal").read_text().splitlines())
        result = {"kind": f"rank {rank}", "step": step, "after_seconds": round(seconds, 3), "steps_taken": lines}
        if runs.steps_of(home / "journal") != unbroken:
            return {**result, "outcome": _trials.WRONG, "detail": "other steps than those of the run without kills"}
        # a kill near the end may come after the last step
        return {**result, "outcome": "equal"}

    try:
        yield trial
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(_trials.main(__doc__ or "", "kills", worker, ["equal"], count=20))
