"""A node of a Slurm job dies: Slurm queues the job again, and it ends as one whose nodes lived.

python scripts/drill/slurm_nodes.py --count 5 [--seed 0]

Each trial is a job on two nodes of a Slurm on this machine (see tests/distributed/_slurm.py for what has to be
installed), one rank on each, that saves every third of ten steps. One node, with its daemon and all processes of the
job, gets SIGKILL, and comes back when Slurm has queued the job again. Exits with 1 unless loss and norm of the gradient
of every step are, bit for bit, those of two ranks without Slurm.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _checkpoint_runs
import _counted
import _ray_runs as runs
import _slurm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "distributed" / "_slurm_script.py"


def trial(cluster: _slurm.Cluster, folder: Path, node: str) -> str:
    """Run one job, and kill the node while the job waits after iteration 4; returns the exit code and the last line of
    its output, or an empty text if it succeeded."""
    command = [sys.executable, "-m", "megatron_wrap.cli.main"]
    path = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    environment = {**os.environ, **cluster.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = ["train", str(runs.CONFIG), "--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "1"]
    words += ["--script", str(SCRIPT), *runs.overrides(folder)]
    subprocess.run([*command, *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    job = cluster.run("squeue", "--noheader", "--format=%i").strip()
    _slurm.wait_for(lambda: (folder / "journal").exists() and 4 in runs.steps_of(folder / "journal"))
    cluster.kill_node(node)
    (folder / "go").touch()
    _slurm.wait_for(lambda: _starts_again(cluster, job))
    cluster.start_node(node)
    follow = subprocess.run([*command, "jobs", "--follow", job], env=environment, capture_output=True, text=True)
    return f"exit code {follow.returncode}: {follow.stderr.splitlines()[-1]}" if follow.returncode else ""


def _starts_again(cluster: _slurm.Cluster, job: str) -> bool:
    """Whether Slurm has queued the job again; with both nodes in use it may have started already."""
    shown = cluster.run("scontrol", "show", "job", job)
    return "JobState=PENDING" in shown or "Restarts=0" not in shown


def drill(count: int, seed: int, scratch: Path) -> list[str]:
    """Run the trials; returns the failures."""
    _checkpoint_runs.in_new_processes(2, runs.without_ray, scratch / "unbroken", runs.STEPS)
    failures = []
    with _slurm.cluster(scratch / "slurm", ("n1", "n2")) as cluster:
        for number in range(count):
            node, folder = random.Random(f"{seed} {number}").choice(cluster.nodes), scratch / str(number)
            failure = trial(cluster, folder, node)
            if not failure and runs.steps_of(folder / "journal") != runs.steps_of(scratch / "unbroken" / "journal"):
                failure = "other steps than those without Slurm"
            failures += [f"trial {number}, {node}: {failure}"] if failure else []
            print(f"trial {number}: {node} killed, {failure or 'equal'}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(_counted.run(drill, __doc__ or "", 5, "jobs"))
