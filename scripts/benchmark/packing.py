"""Real tokens per second of ways to batch a mix of lengths: padding to seq_length, dynamic padding, packing, and
packing with a token budget. One process; each way has a run of its own with the same samples, and prints a line.

    python scripts/benchmark/packing.py scripts/benchmark/llama-1b.yaml [a.b=c ...] [--steps 6] [--micro-batch-size 4]
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from length_mix import mixed_samples

from megatron_wrap.core import MegatronWrap, exit_on_user_error

PACKING, COLLATE = "megatron_wrap.flow.packing", "megatron_wrap.flow.collate_type"


def main() -> None:
    """Run each way in a MegatronWrap of its own, one after the other, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--budget", type=int, default=32768, help="max_tokens_per_micro_batch of the last way")
    parser.add_argument("--ways", default="padded,dynamic,packed,budget")
    parser.add_argument("--profile", default="", help="ways whose GPU idle time is also measured")
    arguments = parser.parse_intermixed_args()
    train = "megatron_lm.train.common"
    size, micro = f"{train}.global_batch_size={arguments.global_batch_size}", f"{train}.micro_batch_size"
    ways = {
        "padded": [f"{COLLATE}=fixed_length", f"{micro}={arguments.micro_batch_size}"],
        "dynamic": [f"{COLLATE}=variable_length", f"{micro}={arguments.micro_batch_size}"],
        "packed": [f"{COLLATE}=variable_length", f"{PACKING}=true", f"{micro}={arguments.micro_batch_size}"],
        "budget": [
            *(f"{COLLATE}=variable_length", f"{PACKING}=true", f"{micro}={arguments.micro_batch_size}"),
            f"{train}.max_tokens_per_micro_batch={arguments.budget}",
        ],
    }
    for way in arguments.ways.split(","):
        measure(way, arguments, [size, *ways[way], *arguments.overrides])


def measure(way: str, arguments: Any, overrides: list[str]) -> None:
    """One way: a line with its median step, real tokens per second and memory."""
    with MegatronWrap(arguments.config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        train, count = wrap.config.train, arguments.warmup + arguments.steps
        samples = mixed_samples(
            arguments.global_batch_size * (count + 4), train.seq_length, wrap.config.arch.vocab_size or 0
        )
        rates, seconds = [], []
        batches = wrap.batches(samples)
        for step in range(count):
            batch = next(batches)
            wrap.platform.synchronize()
            started = time.perf_counter()
            metrics = wrap.train(batch)
            wrap.platform.synchronize()
            if step >= arguments.warmup:
                seconds.append(time.perf_counter() - started)
                rates.append(sum(len(sample["input_ids"]) - 1 for sample in batch) / seconds[-1])
        report = {
            "way": way,
            "real_tokens_per_second": round(statistics.median(rates)),
            "rates": [round(rate) for rate in rates],
            "step_seconds": round(statistics.median(seconds), 4),
            "loss": metrics["loss"],
            "memory_max_gib": round(metrics.get("memory_max", 0.0), 2),
        }
        if way in arguments.profile.split(",") and torch.cuda.is_available():
            report |= profiled(wrap, batches)
        batches.close()
        sys.stdout.write("RESULT " + json.dumps(report) + "\n")
        sys.stdout.flush()


def profiled(wrap: MegatronWrap, batches: Any) -> dict[str, Any]:
    """Milliseconds of three steps in a loop as a user writes it, and those in which no kernel runs; names of attention
    kernels."""
    wrap.train(next(batches))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            wrap.train(next(batches))
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0]
    names = {
        event.name[:60] for event in kernels if any(word in event.name for word in ("flash", "fmha", "sdpa", "varlen"))
    }
    return {
        "three_steps_ms": round(whole / 1e3, 1),
        "idle_ms": round((whole - busy) / 1e3, 1),
        "attention": sorted(names)[:4],
    }


if __name__ == "__main__":
    with exit_on_user_error():
        main()
