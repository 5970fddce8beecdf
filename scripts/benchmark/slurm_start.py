"""Time to the first step of a run on two CPU ranks: a job of Slurm from its start, compared with plain torchrun.

python scripts/benchmark/slurm_start.py [--rounds 3]

Starts a Slurm of one node on this machine (see tests/distributed/_slurm.py for what has to be installed). A round is
one run of each, one after the other; printed are the seconds of each round and the median of the differences.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _ray_runs as runs
import _slurm

ROOT = Path(__file__).parents[2]


def seconds_to_first_step(folder: Path, since: float) -> float:
    """Wait for the first line of metrics.jsonl."""
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or not metrics.stat().st_size:
        time.sleep(0.01)
    return time.time() - since


def plain(folder: Path) -> float:
    """Of torchrun and examples/train.py."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    began = time.time()
    words = [*torchrun, str(ROOT / "examples" / "train.py"), str(runs.CONFIG), *runs.overrides(folder)]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        return seconds_to_first_step(folder, began)


def in_slurm(cluster: _slurm.Cluster, folder: Path) -> float:
    """Of a job, from the moment at which Slurm opens the log of its script."""
    words = [sys.executable, "-m", "megatron_wrap.cli.main", "train", str(runs.CONFIG), "--launcher", "slurm"]
    words += ["--gpus-per-node", "2", *runs.overrides(folder)]
    subprocess.run(words, env={**environment(), **cluster.environment}, check=True, stdout=subprocess.DEVNULL)
    logs = folder / "logs"
    while not list(logs.glob("slurm-*.log")):
        time.sleep(0.01)
    began = time.time()
    seconds = seconds_to_first_step(folder, began)
    _slurm.wait_for(lambda: not cluster.run("squeue", "--noheader").strip())
    return seconds


def environment() -> dict[str, str]:
    """Of both."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    differences = []
    with tempfile.TemporaryDirectory() as scratch, _slurm.cluster(Path(scratch, "slurm")) as cluster:
        for number in range(rounds):
            folders = [Path(scratch, f"{name}{number}") for name in ("plain", "slurm")]
            seconds = plain(folders[0]), in_slurm(cluster, folders[1])
            differences.append(seconds[1] - seconds[0])
            print(
                f"torchrun {seconds[0]:.2f} s, job {seconds[1]:.2f} s, difference {differences[-1]:+.2f} s", flush=True
            )
    print(f"median of the differences: {statistics.median(differences):+.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
