"""One mixture-of-experts layer of a run: forward and backward, with the kernels that it launches.

    python scripts/benchmark/experts_layer.py scripts/benchmark/moe-30b-a3b-layers.yaml [a.b=c ...]
        [--passes 6] [--rows 30] [--balanced]

The model has one layer; its router, dispatcher and experts are those of training, without attention. Prints a RESULT
line: milliseconds of the forward and of both passes, those until the host has launched them, the number of kernels and
their time; then a table of kernels. Start it with torchrun and
`megatron_lm.model.parallel.expert_model_parallel_size=2` for experts on two GPUs. With `PYTHONPATH` set to another
checkout it measures that one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from typing import Any

import torch

from megatron_wrap.core import MegatronWrap, exit_on_user_error


def main() -> None:
    """Measure the layer, then profile it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--passes", type=int, default=6, help="measured passes")
    parser.add_argument("--rows", type=int, default=30, help="of the table of kernels")
    parser.add_argument("--balanced", action="store_true", help="random logits choose the experts")
    arguments = parser.parse_intermixed_args()
    arch = "megatron_lm.model.arch"
    overrides = [f"{arch}.num_layers=1", f"{arch}.vocab_size=1024", "megatron_wrap.logger.progress_bar=false"]
    if arguments.balanced:
        overrides.append(f"{arch}.moe_router_force_load_balancing=true")
    with MegatronWrap(arguments.config, overrides=[*overrides, *arguments.overrides]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        measure(wrap, arguments.passes, arguments.rows)


def measure(wrap: MegatronWrap, passes: int, rows: int) -> None:
    """Print the RESULT lines of rank 0 and the table."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    (layer,) = (module for module in wrap.state.chunks[0].modules() if isinstance(module, BaseMoELayer))
    train, device = wrap.config.train, next(layer.parameters()).device
    shape = (train.seq_length, train.micro_batch_size, wrap.config.arch.hidden_size)
    dtype = next(layer.experts.parameters()).dtype
    hidden = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn_like(hidden)
    is_first = torch.distributed.get_rank() == 0

    def both() -> None:
        with wrap.state.chunks[0].no_sync():  # the gradients' reduction is not the layer's
            layer(hidden)[0].backward(grad)

    def forward() -> None:
        layer(hidden)

    for _ in range(3):
        both()
    times = {"forward": milliseconds(forward, passes), "both": milliseconds(both, passes)}
    kernels = profile(both, passes) if device.type == "cuda" else {}
    if not is_first:
        return
    launched = sum(count for count, _ in kernels.values())
    line: dict[str, Any] = {name: {"ms": each[0], "host_ms": each[1]} for name, each in times.items()}
    line |= {"kernels": round(launched, 1), "kernel_ms": round(sum(each for _, each in kernels.values()), 3)}
    sys.stdout.write("RESULT " + json.dumps(line) + "\n")
    ordered = sorted(kernels.items(), key=lambda item: -item[1][1])
    for name, (count, elapsed) in ordered[:rows]:
        sys.stdout.write(f"{elapsed:9.3f} ms {count:6.1f} x  {name[:110]}\n")
    sys.stdout.flush()


def milliseconds(function: Any, passes: int) -> tuple[float, float]:
    """Median time of a call with the device's work, and of the host until it has launched that work."""
    elapsed, launched = [], []
    for _ in range(passes):
        synchronize()
        started = time.perf_counter()
        function()
        launched.append(time.perf_counter() - started)
        synchronize()
        elapsed.append(time.perf_counter() - started)
    return tuple(round(1000 * sorted(values)[passes // 2], 3) for values in (elapsed, launched))  # type: ignore[return-value]


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile(function: Any, passes: int) -> dict[str, tuple[float, float]]:
    """Kernel -> launches and milliseconds of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(passes):
            function()
        synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name][0] += 1 / passes
            totals[event.name][1] += event.device_time / 1000 / passes
    return {name: (count, elapsed) for name, (count, elapsed) in totals.items()}


if __name__ == "__main__":
    with exit_on_user_error():
        main()
