"""Speed and peak memory of a step with stored logits, with linear cross-entropy, and with a vocabulary of 8, in turn in
this process; one line of JSON for each. Memory "beyond" is the peak minus that of the vocabulary of 8.

    python scripts/benchmark/linear_cross_entropy.py [CONFIG] [a.b=c ...] [--flow sft] [--length 4096] [--micro 4]
        [--global 16] [--ways stored,deferred,eight] [--steps 4] [--warmup 2] [--name NAME]

The default CONFIG is scripts/benchmark/llama-1b.yaml. A sample of dpo is a pair of sequences of the whole length, whose
reference log-probabilities it contains.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from reference_models import random_pairs
from train_speed import random_tokens

from megatron_wrap.core import MegatronWrap, exit_on_user_error

ARCH, TRAIN, FLOW = "megatron_lm.model.arch", "megatron_lm.train.common", "megatron_wrap.flow"
DEFERS = "megatron_wrap.model_provider.linear_cross_entropy"
SMALL = 8
WAYS: dict[str, tuple[str, ...]] = {
    "stored": (f"{DEFERS}=false",),
    "deferred": (f"{DEFERS}=true",),
    "eight": (f"{DEFERS}=false", f"{ARCH}.vocab_size={SMALL}", f"{ARCH}.make_vocab_size_divisible_by={SMALL}"),
}
GIB = 2**30


def measure(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Median step time and peak memory after the first `warmup` steps, and the losses."""
    sizes = {"seq_length": arguments.length, "micro_batch_size": arguments.micro, "global_batch_size": arguments.all}
    overrides = [f"{TRAIN}.{key}={value}" for key, value in sizes.items()]
    overrides += [f"{FLOW}.__select__=gpt_{arguments.flow}", f"{FLOW}.collate_type=fixed_length"]
    with MegatronWrap(arguments.config, overrides=[*overrides, *arguments.overrides, *WAYS[way]]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        vocabulary = wrap.config.arch.vocab_size or 0
        on_gpu = wrap.platform.device.type == "cuda"
        samples: list[dict[str, Any]]
        if arguments.flow == "dpo":
            samples = random_pairs(arguments.all, arguments.length, vocabulary)
            reference = {"reference_chosen_log_probs": -1.0, "reference_rejected_log_probs": -2.0}
            samples = [{**sample, **reference} for sample in samples]
        else:
            samples = random_tokens(arguments.all, arguments.length, vocabulary)
        seconds, losses = [], []
        for step in range(arguments.warmup + arguments.steps):
            if on_gpu and step == arguments.warmup:
                torch.cuda.reset_peak_memory_stats()
            wrap.platform.synchronize()
            started = time.perf_counter()
            losses.append(wrap.train(samples)["loss"])
            wrap.platform.synchronize()
            seconds.append(time.perf_counter() - started)
        peak = wrap.platform.memory_gib()["memory_max"]
        resting = wrap.platform.memory_gib()["memory_allocated"]
    return {
        "step_seconds": statistics.median(seconds[arguments.warmup :]),
        "fastest_seconds": min(seconds[arguments.warmup :]),
        "peak_gib": peak,
        "between_steps_gib": resting,
        "losses": [round(loss, 6) for loss in losses],
    }


def main() -> None:
    """Measure the ways and report each as soon as it is done; the others survive a failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="scripts/benchmark/llama-1b.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--name", default="")
    parser.add_argument("--flow", default="sft", choices=("sft", "dpo"))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--global", dest="all", type=int, default=16)
    parser.add_argument("--ways", default="stored,deferred,eight")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    arguments = parser.parse_intermixed_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    results: dict[str, dict[str, Any]] = {}
    for way in arguments.ways.split(","):
        started = time.perf_counter()
        try:
            outcome = results[way] = measure(way, arguments)
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:600]}
        total = round(time.perf_counter() - started, 1)
        row = {
            "name": arguments.name,
            "way": way,
            "device": device,
            "torch": torch.__version__,
            "length": arguments.length,
        }
        sys.stdout.write("RESULT " + json.dumps({**row, **outcome, "total_seconds": total}) + "\n")
        sys.stdout.flush()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    compare(results, arguments.name)


def compare(results: dict[str, dict[str, Any]], name: str) -> None:
    """Print the ratio of the step times and the memory beyond that of a vocabulary of 8."""
    ratios: dict[str, Any] = {"name": name}
    if {"stored", "deferred"} <= results.keys():
        ratios["time_ratio"] = results["deferred"]["step_seconds"] / results["stored"]["step_seconds"]
    for way in ("stored", "deferred"):
        if {way, "eight"} <= results.keys():
            ratios[f"{way}_beyond_gib"] = results[way]["peak_gib"] - results["eight"]["peak_gib"]
    sys.stdout.write("RESULT " + json.dumps(ratios) + "\n")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
