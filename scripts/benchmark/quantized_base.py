"""Training an adapter for frozen weights in bf16, FP8 and NF4: tokens per second, peak memory, seconds to set up.

    python scripts/benchmark/quantized_base.py 8b [--kinds bf16,fp8,nf4] [a.b=c ...]
    python scripts/benchmark/quantized_base.py 70b --kinds nf4 --micro-batch-size 1 --global-batch-size 2

The sizes are those of Llama 3.1, with random weights that each way draws on the device and quantizes while it builds
the model, r 16 for all linear layers, and random tokens. One process; a line for each way.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from train_speed import random_tokens

from megatron_wrap.core import MegatronWrap, exit_on_user_error
from megatron_wrap.errors import MegatronWrapError

CONFIG = Path(__file__).with_name("llama-1b.yaml")
SHAPES = {
    "8b": {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32},
    "70b": {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64},
    "tiny": {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "vocab_size": 4096},
}
"""Of `megatron_lm.model.arch`; the rest is that of the configuration."""


def overrides_of(kind: str, arguments: argparse.Namespace) -> list[str]:
    """The run of one way."""
    train = "megatron_lm.train.common"
    return [
        *(f"megatron_lm.model.arch.{key}={value}" for key, value in SHAPES[arguments.shape].items()),
        *("megatron_wrap.adapter.__select__=lora", "megatron_wrap.adapter.r=16", "megatron_wrap.adapter.lora_alpha=32"),
        *(f"megatron_wrap.adapter.base_weights={kind}", "megatron_wrap.logger.progress_bar=false"),
        *(f"{train}.seq_length={arguments.seq_length}", f"{train}.micro_batch_size={arguments.micro_batch_size}"),
        f"{train}.global_batch_size={arguments.global_batch_size}",
        *arguments.overrides,
    ]


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the model and train in one way."""
    gc.collect()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with MegatronWrap(CONFIG, overrides=overrides_of(kind, arguments)) as wrap:
        wrap.initialize()
        started = time.perf_counter()
        wrap.setup_model_and_optimizer()
        wrap.platform.synchronize()
        setup = time.perf_counter() - started
        built = torch.cuda.memory_allocated() / 2**30 if cuda else None
        samples = random_tokens(wrap.global_batch_size, arguments.seq_length, wrap.config.arch.vocab_size or 0)
        batches, seconds = wrap.batches(samples), []
        for _ in range(arguments.warmup + arguments.steps):
            batch = next(batches)
            wrap.platform.synchronize()
            started = time.perf_counter()
            metrics = wrap.train(batch)
            wrap.platform.synchronize()
            seconds.append(time.perf_counter() - started)
        batches.close()
        return {
            "shape": arguments.shape,
            "base_weights": kind,
            "tokens_per_second": round(
                wrap.global_batch_size * arguments.seq_length / statistics.median(seconds[arguments.warmup :]), 1
            ),
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
            "memory_before_training_gib": None if built is None else round(built, 2),
            "setup_seconds": round(setup, 1),
            "step_seconds": [round(value, 3) for value in seconds],
            "loss": metrics["loss"],
        }


def main() -> None:
    """Measure each way; one that does not fit into the memory is reported, and the others are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--kinds", default="bf16,fp8,nf4")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    arguments = parser.parse_intermixed_args()
    for kind in arguments.kinds.split(","):
        try:
            result = measure(kind, arguments)
        except (torch.OutOfMemoryError, MegatronWrapError) as error:
            if isinstance(error, MegatronWrapError) and "memory" not in str(error):
                raise
            result = {"shape": arguments.shape, "base_weights": kind, "error": str(error).splitlines()[0]}
        sys.stdout.write("RESULT " + json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with exit_on_user_error():
        main()
