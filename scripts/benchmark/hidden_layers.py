"""Linear layers of tensor and sequence parallelism whose communication overlaps with their products (`tp_comm_overlap`
of torch's layers), compared with Megatron-Core's, for sizes of micro-batches and numbers of parts of each share.

    NCCL_NVLS_ENABLE=0 torchrun --nproc_per_node 2 scripts/benchmark/hidden_layers.py [--tokens 8192 16384] [--tiny]

Prints a RESULT line of rank 0 for each size: milliseconds of forward and backward pass in bf16, with weight gradients
added in fp32, of the four linear layers of a decoder layer of the 1.5B Llama or of 8B: `core` is Megatron-Core's,
`nccl` and `peers` ours with transfers by NCCL and by the copy engines, and the same in `graphs`, without the time of
Python. `--tiny` runs small sizes on CPUs, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # as in a run: with 1 the products of graphs wait for copies

import torch
import torch.distributed

WIDTHS = {2048: (3072, 2048, 16384, 8192), 4096: (6144, 4096, 28672, 14336)}
"""Hidden size -> outputs of the query, key and value layer, inputs of attention's output layer, both of the MLP."""
SIZES = ((4096, 2048), (8192, 2048), (16384, 2048), (4096, 4096), (8192, 4096))
"""Tokens of a micro-batch, hidden size."""
LAYERS = ("qkv", "proj", "fc1", "fc2")


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="of the micro-batches (default: all sizes)")
    parser.add_argument("--tiny", action="store_true", help="small sizes on CPUs")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.tiny else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not arguments.tiny:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("gloo" if arguments.tiny else "nccl")

    from megatron_wrap.nn.kernels.weight_gradients import WeightGradients
    from megatron_wrap.platform import choose_platform
    from megatron_wrap.platform.megatron_core.kernels import LayerKernels

    platform = choose_platform("cpu" if arguments.tiny else "cuda")
    platform.install()
    platform.use_kernels(LayerKernels(weight_gradients=WeightGradients))
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    scale = 64 if arguments.tiny else 1
    for tokens, hidden in SIZES:
        if arguments.tokens is not None and tokens not in arguments.tokens:
            continue
        widths = tuple(width // scale for width in WIDTHS[hidden])
        measure(tokens // scale, hidden // scale, widths, device)
    torch.distributed.destroy_process_group()


def measure(tokens: int, hidden: int, widths: tuple[int, ...], device: torch.device) -> None:
    """One size."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_wrap.nn.linear_layers import hidden_communication as ours
    from megatron_wrap.parallel import collectives

    theirs = (ColumnParallelLinear, RowParallelLinear)
    classes = (ours.GatheringColumnParallelLinear, ours.ScatteringRowParallelLinear)
    milliseconds: dict[str, dict[str, float]] = {}
    kinds = ("core", "nccl", "peers") if device.type == "cuda" else ("core", "nccl")
    for kind, graph in ((kind, graph) for graph in (False, device.type == "cuda") for kind in kinds):
        without = {} if kind == "peers" else {"peer_memory": lambda *_: None}
        column, row = theirs if kind == "core" else classes
        times = {}
        with mock.patch.multiple(collectives, **without) if without else contextlib.nullcontext():
            for number, (name, width) in enumerate(zip(LAYERS, widths, strict=True)):
                function = passes(row if number % 2 else column, tokens, hidden, width, device)
                times[name] = round(median_ms(captured(function) if graph else function, device), 3)
        milliseconds[f"{kind}-graph" if graph else kind] = {**times, "sum": round(sum(times.values()), 3)}
    if torch.distributed.get_rank() == 0:
        print("RESULT", json.dumps({"tokens": tokens, "hidden": hidden, **milliseconds}), flush=True)


def passes(layer: Any, tokens: int, hidden: int, width: int, device: torch.device) -> Callable[[], object]:
    """A function of both passes of a layer between `hidden` and `width` elements (global)."""
    from megatron.core import ModelParallelConfig

    size = torch.distributed.get_world_size()
    config = ModelParallelConfig(
        tensor_model_parallel_size=size,
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=device.type == "cuda",
        perform_initialization=False,
    )
    shared = {"config": config, "init_method": lambda weight: weight, "skip_bias_add": False, "bias": False}
    if layer.__name__.endswith("ColumnParallelLinear"):
        module = layer(hidden, width, gather_output=False, **shared)
        shapes = (tokens // size, 1, hidden), (tokens, 1, width // size)
    else:
        module = layer(width, hidden, input_is_parallel=True, **shared)
        shapes = (tokens, 1, width // size), (tokens // size, 1, hidden)
    weight = module.to(device).weight
    torch.nn.init.normal_(weight, std=0.02)
    weight.main_grad = torch.zeros(weight.shape, device=device)
    weight.grad_added_to_main_grad = False
    inputs, grad = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
    inputs.requires_grad_()

    def run() -> None:
        inputs.grad = weight.grad = None
        module(inputs)[0].backward(grad)

    return run


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """A function that replays the CUDA graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


def median_ms(function: Callable[[], object], device: torch.device, groups: int = 5, calls: int = 8) -> float:
    """Of a call, of groups of calls that follow each other as layers do; the slowest process."""
    for _ in range(3):
        function()
    times = []
    for _ in range(groups):
        synchronize(device)
        torch.distributed.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        times.append((time.perf_counter() - began) * 1000 / calls)
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    return float(slowest)


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
