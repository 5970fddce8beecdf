"""How long a step waits for its data: collated in the training process, and ahead by worker processes.

Blocks of steps with each number of workers take turns on one model. One JSON line for each has the median wait for the
next batch, the median step, and the share of the time that was waiting.

    python scripts/benchmark/loading.py [CONFIG] [a.b=c ...] [--workers 0 1] [--blocks 3] [--steps 10]
    torchrun --nproc-per-node 2 scripts/benchmark/loading.py ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from length_mix import mixed_samples

from megatron_wrap.core import MegatronWrap, exit_on_user_error


def waits_and_steps(
    wrap: MegatronWrap, samples: Sequence[Any], workers: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of waiting for a batch and of training on it, of each of `steps` steps; two more come before them."""
    state = wrap.state
    state.config = replace(state.config, data=replace(state.config.data, num_workers=workers))
    waits, durations = [], []
    batches = wrap.batches(samples)
    for _ in range(steps + 2):
        begun = time.perf_counter()
        batch = next(batches)
        received = time.perf_counter()
        wrap.train(batch)
        if state.platform.device.type == "cuda":
            torch.cuda.synchronize()
        waits.append(received - begun)
        durations.append(time.perf_counter() - received)
    batches.close()  # type: ignore[attr-defined]
    return waits[2:], durations[2:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="scripts/benchmark/overhead.yaml")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_intermixed_args()
    total = len(arguments.workers) * arguments.blocks * (arguments.steps + 2)
    overrides = [*arguments.overrides, f"megatron_lm.train.common.train_iters={total + 1}"]
    with MegatronWrap(arguments.config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        state = wrap.state
        samples = mixed_samples(2048, wrap.config.train.seq_length, state.shape.vocab_size)
        waits: dict[int, list[float]] = {workers: [] for workers in arguments.workers}
        durations: dict[int, list[float]] = {workers: [] for workers in arguments.workers}
        for _ in range(arguments.blocks):
            for workers in arguments.workers:
                waited, took = waits_and_steps(wrap, samples, workers, arguments.steps)
                waits[workers] += waited
                durations[workers] += took
        if state.parallel.world.rank == 0:
            for workers in arguments.workers:
                waited, took = waits[workers], durations[workers]
                result = {
                    "num_workers": workers,
                    "wait_ms": round(1e3 * statistics.median(waited), 2),
                    "longest_wait_ms": round(1e3 * max(waited), 2),
                    "step_ms": round(1e3 * statistics.median(took), 2),
                    "waiting_share": round(sum(waited) / (sum(waited) + sum(took)), 4),
                    "steps": len(waited),
                }
                print(json.dumps(result))


if __name__ == "__main__":
    with exit_on_user_error():
        main()
