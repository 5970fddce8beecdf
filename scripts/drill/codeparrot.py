"""Train examples/codeparrot in a new folder, and compare its figures with the expected ones.

    python scripts/drill/codeparrot.py [--count 1700]

With as many iterations as cpu.yaml has, the validation loss must be below 60% of the unigram entropy of the tokens, and
the share of the completions that are Python 10 percentage points above that of the first evaluation. With fewer, the
loss must be 0.5 below that of uniform probabilities, with which a run begins.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

from _counted import run

EXAMPLE = Path(__file__).parents[2] / "examples/codeparrot/run.py"
FULL, VOCABULARY = 1700, 1024
SMALLER = ("num_layers=2", "hidden_size=96", "ffn_hidden_size=384")
"""The model of a run with fewer iterations: the same steps and commands in a quarter of the time."""


def drill(count: int, seed: int, scratch: Path) -> list[str]:
    """Failures of a run of `count` iterations."""
    train = "megatron_lm.train"
    overrides = [f"{train}.common.seed={seed + 1234}"]
    if count < FULL:
        library = Path(os.__file__).parent
        overrides += ["--input", str(library / "asyncio"), str(library / "email"), "--folder", str(scratch / "run")]
        overrides += [f"{train}.common.train_iters={count}", f"{train}.common.eval_interval={count // 2}"]
        overrides += [f"{train}.learning-rate.lr_warmup_iters={count // 10}"]
        overrides += [f"megatron_lm.model.arch.{key}" for key in SMALLER]
    command = [sys.executable, EXAMPLE, "--folder", scratch / "run", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [done.stdout[-2000:] + done.stderr[-2000:]]
    summary = json.loads((scratch / "run/summary.json").read_text(encoding="utf-8"))
    print(json.dumps(summary))
    loss = summary["validation_loss"]
    if count < FULL:
        highest = math.log(VOCABULARY) - 0.5
        return [] if loss < highest else [f"validation loss {loss} after {count} iterations, not below {highest:.3f}"]
    entropy = summary["unigram_entropy"]
    failures = (
        [] if loss < 0.6 * entropy else [f"validation loss {loss}, not below 60% of the unigram entropy {entropy}"]
    )
    _, first, *_, last = summary["parse_rate_by_iteration"].values()  # the first evaluation: random weights
    if last < first + 0.1:
        failures.append(f"{last:.0%} of the completions are Python, {first:.0%} were at the first evaluation")
    return failures


if __name__ == "__main__":
    sys.exit(run(drill, __doc__ or "", FULL, "iterations of the training"))
