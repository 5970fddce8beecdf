"""The example of policy optimization learns from each seed: held-out reward from below 0.2 to at least 0.6.

python scripts/drill/grpo.py --count 3

Each seed is a run of examples/grpo/train.py in one process with one thread, which ends when the reward is reached. The
first run is killed after its first checkpoint and resumes. Exits with 1 if a run needs more than eight minutes
of processor time, if log-probabilities of rollout and training differ by more than 1e-5, or if a rollout is missing.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _counted import run

ROOT = Path(__file__).parents[2]
START, REACHED, MOST_SECONDS, LARGEST_DIFFERENCE = 0.2, 0.6, 480, 1e-5
SAVE_INTERVAL = 25
TRAIN, DIFFERENCE = "megatron_lm.train.common", "sampling/sampling_logp_difference/max"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _start(seed: int, folder: Path) -> subprocess.Popen[str]:
    overrides = [
        f"{TRAIN}.seed={seed}",
        f"{TRAIN}.save={folder / 'checkpoints'}",
        f"{TRAIN}.save_interval={SAVE_INTERVAL}",
        f"megatron_wrap.logger.output_dir={folder}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "examples/grpo/train.py", "--until", str(REACHED), *overrides]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **streams)


def _kill_after_first_checkpoint(seed: int, folder: Path) -> list[str]:
    process = _start(seed, folder)
    saved = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    while process.poll() is None and not saved.is_file():
        time.sleep(0.05)
    process.kill()
    output, _ = process.communicate()
    return [] if saved.is_file() else [f"seed {seed} ended before its first checkpoint:\n{output}"]


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _train(seed: int, folder: Path, killed: bool) -> list[str]:
    """Train with one seed, and print a line with the result; returns the failures."""
    before, started = _processor_seconds(), time.monotonic()
    wrong = _kill_after_first_checkpoint(seed, folder) if killed else []
    process = _start(seed, folder)
    output, _ = process.communicate()
    if process.returncode:
        return [*wrong, f"seed {seed} failed:\n{output}"]
    seconds, elapsed = _processor_seconds() - before, time.monotonic() - started
    held_out, rollouts = _lines(folder / "held-out.jsonl"), _lines(folder / "rollouts.jsonl")
    first, last = held_out[0]["reward"], held_out[-1]["reward"]
    difference = max(line.get(DIFFERENCE, 0.0) for line in _lines(folder / "metrics.jsonl"))
    print(
        f"seed {seed}{', killed and resumed' * killed}: held-out reward {first:.3f} before, {last:.3f} after "
        f"{held_out[-1]['iteration']} iterations, {seconds:.0f} s of one processor ({elapsed:.0f} s elapsed), "
        f"log-probabilities differ by at most {difference:.1e}; the best constant completion has "
        f"{held_out[0]['best_constant']:.3f}",
        flush=True,
    )
    if not (max(first, held_out[0]["best_constant"]) < START and last >= REACHED):
        wrong.append(f"seed {seed}: the reward does not rise from below {START} to {REACHED}")
    if seconds > MOST_SECONDS:
        wrong.append(f"seed {seed}: {seconds:.0f} s of processor time are more than {MOST_SECONDS}")
    if difference > LARGEST_DIFFERENCE:
        wrong.append(f"seed {seed}: log-probabilities differ by {difference:.1e}, more than {LARGEST_DIFFERENCE}")
    if [line["iteration"] for line in rollouts] != list(range(held_out[-1]["iteration"])):
        wrong.append(f"seed {seed}: rollouts.jsonl does not contain each rollout once")
    return wrong


def drill(count: int, seed: int, scratch: Path) -> list[str]:
    """Train with `count` seeds after `seed`; returns the failures."""
    seeds = range(seed + 1, seed + 1 + count)
    return [line for run_seed in seeds for line in _train(run_seed, scratch / str(run_seed), run_seed == seed + 1)]


if __name__ == "__main__":
    sys.exit(run(drill, __doc__ or "", count=3, trials="seeds to train with"))
