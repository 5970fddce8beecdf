"""Speed and memory of recomputation, offloaded optimizer states and FP8 on one GPU: one line of JSON for each choice,
then a table. Every choice trains the same model on the same random tokens, in this process, in turn.

    python scripts/benchmark/memory_choices.py [CONFIG] [a.b=c ...] [--only NAME ...] [--steps 6] [--warmup 2]

The default CONFIG is scripts/benchmark/llama-1b.yaml; the overrides apply to every choice.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from train_speed import random_tokens

from megatron_wrap.core import MegatronWrap, exit_on_user_error

DTYPE, RECOMPUTE, OPTIMIZER = (f"megatron_lm.train.{name}" for name in ("dtype", "recompute", "optimizer"))


def _fp8(recipe: str, *further: str) -> tuple[str, ...]:
    return (f"{DTYPE}.fp8=hybrid", f"{DTYPE}.fp8_recipe={recipe}", *(f"{DTYPE}.{text}" for text in further))


def _offload(fraction: float) -> tuple[str, ...]:
    keys = ("use_precision_aware_optimizer=true", "optimizer_cpu_offload=true", "overlap_cpu_optimizer_d2h_h2d=true")
    return tuple(f"{OPTIMIZER}.{text}" for text in (*keys, f"optimizer_offload_fraction={fraction}"))


CHOICES: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": (f"{RECOMPUTE}.__select__=selective",),
    "selective-mlp": (f"{RECOMPUTE}.__select__=selective", f"{RECOMPUTE}.recompute_modules=[mlp]"),
    "full": (f"{RECOMPUTE}.__select__=full",),
    "offload-half": _offload(0.5),
    "offload-all": _offload(1.0),
    "fp8-delayed": _fp8("delayed"),
    "fp8-tensorwise": _fp8("tensorwise"),
    "fp8-tensorwise-first-last": _fp8("tensorwise", "first_last_layers_bf16=true"),
    "fp8-blockwise": _fp8("blockwise"),
    "fp8-blockwise-e4m3": _fp8("blockwise", "fp8=e4m3"),
    "fp8-delayed-weights": _fp8("delayed", "fp8_param_gather=true"),
    "fp8-tensorwise-weights": _fp8("tensorwise", "fp8_param_gather=true"),
    "fp8-blockwise-weights": _fp8("blockwise", "fp8_param_gather=true"),
    "fp8-tensorwise-full": (*_fp8("tensorwise"), f"{RECOMPUTE}.__select__=full"),
}
"""Name -> overrides."""


def measure(config: str, overrides: Sequence[str], steps: int, warmup: int) -> dict[str, Any]:
    """Losses, tokens per second and peak memory, GiB, of a run; the first `warmup` steps do not count."""
    started = time.perf_counter()
    with MegatronWrap(config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        torch.cuda.reset_peak_memory_stats()
        train, vocab_size = wrap.config.train, wrap.config.arch.vocab_size or 0
        samples = random_tokens(wrap.global_batch_size, train.seq_length, vocab_size)
        reports = [wrap.train(samples) for _ in range(steps)]
    speeds = [report["tokens_per_second_per_device"] for report in reports[warmup:]]
    return {
        "tokens_per_second": statistics.median(speeds),
        "memory_max_gib": reports[-1]["memory_max"],
        "losses": [round(report["loss"], 5) for report in reports],
        "total_seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Measure the choices and report each as soon as it is done; the others survive a failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="scripts/benchmark/llama-1b.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--only", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(os.cpu_count() or 1)  # the offloaded part of the optimizer runs on the CPU
    shared = ["megatron_lm.train.common.micro_batch_size=4", f"{OPTIMIZER}.use_distributed_optimizer=true"]
    rows = []
    for name in arguments.only:
        overrides = [*shared, *CHOICES[name], *arguments.overrides]
        try:
            results = measure(arguments.config, overrides, arguments.steps, arguments.warmup)
        except Exception as error:
            results = {"error": f"{type(error).__name__}: {error}"[:600]}
        gc.collect()
        torch.cuda.empty_cache()
        sys.stdout.write("RESULT " + json.dumps({"name": name, **results}) + "\n")
        sys.stdout.flush()
        if "error" not in results:
            speed, memory = results["tokens_per_second"], results["memory_max_gib"]
            rows.append(f"| {name} | {speed:,.0f} | {memory:.1f} | {results['losses'][-1]:.4f} |")
    sys.stdout.write("\n".join(["| choice | tokens/s | peak memory, GiB | last loss |", "| --- | --- | --- | --- |"]))
    sys.stdout.write("\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
