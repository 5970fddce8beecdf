"""Time from a command to the first step of its run, on two ranks: plain torchrun, and launchers of megatron-wrap.

python scripts/benchmark/launch_time.py [--launchers torchrun local ray] [--repeats 3] [--config CONFIG]

Each repetition starts all of them, one after another. The time ends when the run writes the metrics of its first step.
Ray's cluster is started before, and its start is a time of its own; its workers have the priority of other processes
instead of nice 15, which is their default. Prints JSON lines: each measurement, and the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
RANKS, STEPS = 2, 3
POLL_SECONDS, LIMIT_SECONDS = 0.02, 300


def command_of(launcher: str, config: str, overrides: Sequence[str]) -> list[str]:
    """The command that starts the run."""
    if launcher == "torchrun":
        agent = [str(PROGRAMS / "torchrun"), "--standalone", f"--nproc-per-node={RANKS}"]
        return [*agent, str(ROOT / "examples" / "train.py"), config, *overrides]
    words = ["train", config, "--launcher", launcher, "--gpus-per-node", str(RANKS), *overrides]
    return [str(PROGRAMS / "megatron-wrap"), *words]


def first_step_seconds(launcher: str, config: str, folder: Path) -> float:
    """Seconds from the start of the command to its first step; the run continues to its end.

    Raises:
        RuntimeError: the command fails, or no step comes.
    """
    overrides = [f"megatron_lm.train.common.train_iters={STEPS}", f"megatron_wrap.logger.output_dir={folder}"]
    overrides.append("megatron_wrap.init.platform=cpu")
    metrics = folder / "metrics.jsonl"
    folder.mkdir()
    with (folder / "log").open("wb") as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command_of(launcher, config, overrides), stdout=log, stderr=log, cwd=ROOT)
        seconds = None
        while seconds is None and process.poll() is None and time.perf_counter() - begin < LIMIT_SECONDS:
            time.sleep(POLL_SECONDS)
            with contextlib.suppress(OSError):
                if '"iteration": 1' in metrics.read_text():
                    seconds = time.perf_counter() - begin
        code = process.wait()
    if seconds is None or code:
        raise RuntimeError(f"{launcher}: exit code {code}\n{(folder / 'log').read_text()[-3000:]}")
    return seconds


@contextlib.contextmanager
def ray_cluster() -> Iterator[float]:
    """A cluster on this machine, named in RAY_ADDRESS; yields the seconds of its start."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    begin = time.perf_counter()
    head = {"num_cpus": RANKS, "include_dashboard": False, "object_store_memory": 200 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield time.perf_counter() - begin
    finally:
        del os.environ["RAY_ADDRESS"]
        cluster.shutdown()


def report(result: dict[str, object]) -> None:
    """Print a line."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", default=["torchrun", "local", "ray"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--config", default=str(ROOT / "configs" / "tiny-llama-mock.yaml"))
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {launcher: [] for launcher in arguments.launchers}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="launch-time-")))
        if "ray" in seconds:
            started = stack.enter_context(ray_cluster())
            report({"ray cluster started in": round(started, 2)})
        for number in range(arguments.repeats):
            for launcher, measured in seconds.items():
                measured.append(first_step_seconds(launcher, arguments.config, scratch / f"{launcher}{number}"))
                report({"launcher": launcher, "seconds": round(measured[-1], 2)})
    for launcher, measured in seconds.items():
        report({"launcher": launcher, "median": round(statistics.median(measured), 2)})


if __name__ == "__main__":
    main()
