"""Train a configuration on random tokens for some steps and print one JSON line: losses, tokens per second, memory.

torchrun --nproc-per-node 1 scripts/benchmark/train_speed.py scripts/benchmark/llama-1b.yaml --steps 12 [a.b=c ...]
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from typing import Any

import numpy

from megatron_wrap.core import MegatronWrap, exit_on_user_error


def random_tokens(count: int, length: int, vocab_size: int, seed: int = 0) -> list[dict[str, Any]]:
    """Tokenized samples that fill the context."""
    tokens = numpy.random.default_rng(seed).integers(0, vocab_size, (count, length + 1))
    mask = [1] * (length + 1)
    return [{"input_ids": row.tolist(), "loss_mask": mask} for row in tokens]


def main() -> None:
    """Measure; the first `--warmup` steps do not count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--name", default="")
    arguments = parser.parse_intermixed_args()
    with MegatronWrap(arguments.config, overrides=arguments.overrides) as wrap:
        wrap.initialize()
        started = time.perf_counter()
        wrap.setup_model_and_optimizer()
        wrap.platform.synchronize()
        build_seconds = time.perf_counter() - started
        config = wrap.config
        samples = random_tokens(wrap.global_batch_size, config.train.seq_length, config.arch.vocab_size or 0)
        batches = wrap.batches(samples)
        steps, times = [], [time.perf_counter()]
        for _ in range(arguments.steps):
            steps.append(wrap.train(next(batches)))
            times.append(time.perf_counter())
        batches.close()
        # a step's result arrives while the device still updates, so a step ends where the next one's result arrives
        seconds = statistics.median(end - start for start, end in itertools.pairwise(times[arguments.warmup :]))
        tokens = wrap.global_batch_size * config.train.seq_length / wrap.state.parallel.world.size
        counted = steps[arguments.warmup :]
        report = {
            "name": arguments.name,
            "layout": wrap.state.parallel.layout,
            "losses": [round(step["loss"], 6) for step in steps],
            "grad_norms": [round(step["grad_norm"], 5) for step in steps],
            "median_step_seconds": seconds,
            "tokens_per_second_per_device": tokens / seconds,
            "tflops": statistics.median(step["tflops"] * step["elapsed_time"] for step in counted) / seconds,
            "memory_max_gib": steps[-1]["memory_max"],
            "build_seconds": build_seconds,
        }
        if wrap.state.parallel.world.rank == 0:
            sys.stdout.write("RESULT " + json.dumps(report) + "\n")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
