"""What an optimizer and the dtypes of its state cost: memory and time of a step of the 1.5B Llama, and losses over
some hundred steps of a small model on real text (the bytes of Python's standard library).

    python scripts/benchmark/optimizer_state.py [a.b=c ...] [--choices fp32,bf16-moments] [--steps 5] [--loss-steps 200]
        [--shape llama|tiny] [--output FILE]

Prints a RESULT line for each choice, and writes all of them as JSON. A choice that this machine refuses is named with
the reason. Overrides apply to every run.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from fp8_loss import text_samples
from train_speed import random_tokens

from megatron_wrap.core import MegatronWrap, exit_on_user_error
from megatron_wrap.errors import MegatronWrapError

OPTIMIZER, ARCH, TRAIN = "megatron_lm.train.optimizer", "megatron_lm.model.arch", "megatron_lm.train.common"
_AWARE = (f"{OPTIMIZER}.use_precision_aware_optimizer=true", f"{OPTIMIZER}.use_distributed_optimizer=true")
_BF16_MOMENTS = (f"{OPTIMIZER}.exp_avg_dtype=bf16", f"{OPTIMIZER}.exp_avg_sq_dtype=bf16")
_BF16_GRADIENTS = (
    f"{OPTIMIZER}.main_grads_dtype=bf16",
    "megatron_lm.misc.ddp.accumulate_allreduce_grads_in_fp32=false",
)
_FP16_WEIGHTS = (f"{OPTIMIZER}.main_params_dtype=fp16",)
CHOICES: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp32-aware": _AWARE,
    "bf16-moments": (*_AWARE, *_BF16_MOMENTS),
    "fp8-first-moment": (*_AWARE, f"{OPTIMIZER}.exp_avg_dtype=fp8", f"{OPTIMIZER}.exp_avg_sq_dtype=bf16"),
    "bf16-gradients": (*_AWARE, *_BF16_GRADIENTS),
    "fp16-weights": (*_AWARE, *_FP16_WEIGHTS),
    "bf16-moments-and-gradients": (*_AWARE, *_BF16_MOMENTS, *_BF16_GRADIENTS),
    "muon": (f"{OPTIMIZER}.__select__=muon",),
}
"""Name -> overrides. `fp32-aware` has no fp32 copy of the weights: bf16 weights and the 16 bits that they lack."""
SMALL = {"num_layers": 8, "hidden_size": 768, "ffn_hidden_size": 3072, "num_attention_heads": 12, "num_query_groups": 4}
TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2}


def arch(shape: dict[str, int]) -> list[str]:
    """A shape as overrides."""
    return [f"{ARCH}.{name}={value}" for name, value in shape.items()]


def memory_and_time(overrides: list[str], steps: int) -> dict[str, float]:
    """Peak memory (GiB, 0 on a CPU), memory between steps, and seconds of a step, the first two left out."""
    on_gpu = torch.cuda.is_available()
    with run(overrides) as wrap:
        config = wrap.config
        samples = random_tokens(wrap.global_batch_size, config.train.seq_length, config.arch.vocab_size or 0)
        times = []
        for step in range(steps + 2):
            if step == 2 and on_gpu:
                torch.cuda.reset_peak_memory_stats()
            wrap.train(samples)
            wrap.platform.synchronize()
            times.append(time.perf_counter())
        return {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else 0.0,
            "between_steps_gib": round(torch.cuda.memory_allocated() / 2**30, 2) if on_gpu else 0.0,
            "step_seconds": round(statistics.median(end - start for start, end in itertools.pairwise(times[1:])), 4),
        }


def losses(overrides: list[str], steps: int) -> numpy.ndarray:
    """Loss of each step."""
    with run(overrides) as wrap:
        batch = wrap.global_batch_size
        samples = text_samples(batch * steps, wrap.config.train.seq_length)
        return numpy.array([wrap.train(samples[batch * step : batch * (step + 1)])["loss"] for step in range(steps)])


def run(overrides: list[str]) -> MegatronWrap:
    """A run in the measured configuration, ready to train; closed by `with`. Releases what an earlier one held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    wrap = MegatronWrap(Path(__file__).parent / "llama-1b.yaml", overrides=overrides)
    try:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
    except BaseException:
        wrap.close()
        raise
    return wrap


def main() -> None:
    """Measure each choice."""
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--choices", default=",".join(CHOICES))
    parser.add_argument("--steps", type=int, default=5, help="0: neither memory nor time")
    parser.add_argument("--loss-steps", type=int, default=200, help="0: no losses")
    parser.add_argument("--shape", choices=("llama", "tiny"), default="llama")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_intermixed_args()
    is_tiny = arguments.shape == "tiny"
    large = [*arch(TINY), f"{ARCH}.vocab_size=256", f"{TRAIN}.seq_length=64"] if is_tiny else []
    large += [f"{TRAIN}.micro_batch_size=1", f"{TRAIN}.global_batch_size=4"]
    small = [
        *arch(TINY if is_tiny else SMALL),
        f"{ARCH}.vocab_size=256",
        f"{TRAIN}.seq_length={64 if is_tiny else 1024}",
    ]
    small += [f"{TRAIN}.micro_batch_size=16", f"{TRAIN}.global_batch_size=16"]
    results: list[dict[str, Any]] = []
    reference: numpy.ndarray | None = None
    for name in arguments.choices.split(","):
        overrides = [*arguments.overrides, *CHOICES[name]]
        report: dict[str, Any] = {"choice": name}
        try:
            if arguments.steps:
                report |= memory_and_time([*large, *overrides], arguments.steps)
            if arguments.loss_steps:
                curve = losses([*small, *overrides], arguments.loss_steps)
                reference = curve if reference is None else reference
                report |= {
                    "last_ten": round(float(curve[-10:].mean()), 4),
                    "mean_loss_over_the_first_choice": round(float(curve.mean() / reference.mean() - 1), 5),
                }
        except MegatronWrapError as error:
            report["refused"] = str(error)
        results.append(report)
        sys.stdout.write("RESULT " + json.dumps(report) + "\n")
        sys.stdout.flush()
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
