"""Predicted and measured times of two pipeline stages, for six models and splits in one run.

A stage's time is that of the forward and the backward pass of a micro-batch, without waits: between events on the
device around Megatron-Core's `forward_step` and `backward_step`, averaged over the micro-batches of a step; the median
of all steps but the first two. The prediction is `plan/layer_costs.py`; on a device without measured speeds only the
stages' shares are compared. One JSON line per configuration; the last line has the largest difference.

    torchrun --nproc-per-node 2 scripts/benchmark/stage_times.py            # two GPUs
    torchrun --nproc-per-node 2 scripts/benchmark/stage_times.py --tiny     # on the CPU: shares of a tiny model
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from train_speed import random_tokens

from megatron_wrap.bridge.export.frozen import trained_shape
from megatron_wrap.core import MegatronWrap, exit_on_user_error
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.plan.layer_costs import ANY_DEVICE, device_speed, model_costs
from megatron_wrap.plan.pipeline_split import named_split, stage_costs

CONFIG = Path(__file__).with_name("llama-1b.yaml")
ARCH, COMMON, PARALLEL = "megatron_lm.model.arch.", "megatron_lm.train.common.", "megatron_lm.model.parallel."
EVEN = f"{PARALLEL}pipeline_split=even"
CASES: dict[str, tuple[str, ...]] = {
    "even split": (EVEN,),
    "split by cost": (),
    "tied embeddings": (EVEN, f"{ARCH}untie_embeddings_and_output_weights=false"),
    "vocabulary of 32k": (EVEN, f"{ARCH}vocab_size=32000"),
    "micro-batch 1": (EVEN, f"{COMMON}micro_batch_size=1", f"{COMMON}global_batch_size=8"),
    "experts": (
        *(EVEN, f"{ARCH}num_layers=8", f"{ARCH}num_experts=8", f"{ARCH}moe_router_topk=2"),
        *(f"{ARCH}moe_ffn_hidden_size=2048", f"{ARCH}moe_layer_freq=1"),
    ),
}
FULL = (f"{COMMON}micro_batch_size=4", f"{COMMON}global_batch_size=16")
TINY = (
    *(f"{ARCH}{key}" for key in ("num_layers=8", "hidden_size=128", "ffn_hidden_size=512", "num_attention_heads=4")),
    *(f"{ARCH}{key}" for key in ("num_query_groups=2", "kv_channels=32", "vocab_size=4096")),
    *(f"{COMMON}seq_length=256", f"{ARCH}max_position_embeddings=256", f"{COMMON}micro_batch_size=1"),
    *(f"{COMMON}global_batch_size=4", "megatron_wrap.init.platform=cpu", "megatron_lm.train.dtype.__select__=fp32"),
)
TINY_SIZES = {"vocab_size=32000": "vocab_size=1024", "moe_ffn_hidden_size=2048": "moe_ffn_hidden_size=128"}


@contextlib.contextmanager
def timed_passes() -> Iterator[Callable[[], list[float]]]:
    """While entered, each call of Megatron-Core's `forward_step` and `backward_step` is timed; yields a function that
    returns their seconds in order and forgets them."""
    from megatron.core.pipeline_parallel import schedules

    marks: list[tuple[Any, Any]] = []

    def now() -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            start = now()
            result = function(*arguments, **named)
            marks.append((start, now()))
            return result

        return call

    def seconds() -> list[float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            times = [start.elapsed_time(end) / 1000 for start, end in marks]
        else:
            times = [end - start for start, end in marks]
        marks.clear()
        return times

    with contextlib.ExitStack() as stack:
        for name in ("forward_step", "backward_step"):
            stack.enter_context(mock.patch.object(schedules, name, timed(getattr(schedules, name))))
        yield seconds


def measure(name: str, overrides: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Train some steps; the report is the same on both ranks."""
    with MegatronWrap(CONFIG, overrides=[*overrides, f"{PARALLEL}pipeline_model_parallel_size=2"]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        config, vocab_size = wrap.config, wrap.config.arch.vocab_size or 0
        samples = random_tokens(wrap.global_batch_size * steps, config.train.seq_length, vocab_size)
        batches, per_step = wrap.batches(samples), []
        with timed_passes() as seconds:
            for _ in range(steps):
                wrap.train(next(batches))
                per_step.append(seconds())
        batches.close()
        return stage_report(name, wrap, per_step[2:])


def stage_report(name: str, wrap: MegatronWrap, per_step: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Predicted and measured times of the stages of a run whose processes are its stages. Collective.

    Args:
        per_step: for each step the seconds of this process's passes, in any order: they are those of all its
            micro-batches.
    """
    config, vocab_size = wrap.config, wrap.config.arch.vocab_size or 0
    count = wrap.global_batch_size // config.train.micro_batch_size
    measured = gather_objects(statistics.median(sum(times) / count for times in per_step))
    device = wrap.platform.device_name if torch.cuda.is_available() else ""
    costs = model_costs(config, trained_shape(config, vocab_size), device)
    layout = named_split(config)
    tokens = config.train.micro_batch_size * config.train.seq_length
    predicted = [cost * tokens for cost in stage_costs(costs, layout)]
    is_known = device_speed(device) is not ANY_DEVICE
    if not is_known:  # FLOPs have no unit of time here
        predicted = [cost * sum(measured) / sum(predicted) for cost in predicted]
    return {
        "name": name,
        "device": device or "CPU",
        "layers": layout.layers_per_stage,
        "predicted": "seconds" if is_known else "shares of the measured sum",
        "predicted_ms": [round(value * 1000, 2) for value in predicted],
        "measured_ms": [round(value * 1000, 2) for value in measured],
        "difference": [round(ours / real - 1, 4) for ours, real in zip(predicted, measured, strict=True)],
    }


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*", help="of all configurations")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_intermixed_args()
    largest = 0.0
    for name in arguments.cases:
        case = CASES[name]
        if arguments.tiny:
            for size, small in TINY_SIZES.items():
                case = tuple(text.replace(size, small) for text in case)
        report = measure(name, (*(TINY if arguments.tiny else FULL), *case, *arguments.overrides), arguments.steps)
        largest = max(largest, *map(abs, report["difference"]))
        write(json.dumps(report))
    write(json.dumps({"largest_difference": largest}))


def write(line: str) -> None:
    """Print a line on rank 0."""
    if int(os.environ.get("RANK", 0)) == 0:
        sys.stdout.write(f"RESULT {line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with exit_on_user_error():
        main()
