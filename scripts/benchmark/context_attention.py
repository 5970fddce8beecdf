"""Torch's attention over sequences that context-parallel processes share, with each exchange (`cp_comm_type`), compared
with one process that attends over whole sequences alone.

    NCCL_NVLS_ENABLE=0 torchrun --nproc_per_node 2 scripts/benchmark/context_attention.py [--heads 16] [--groups 8]
        [--head-size 128] [--tiny]

Prints a RESULT line of rank 0 for each shape and exchange: milliseconds of forward and backward pass in bf16, and
`of_ideal`, the time of whole sequences on one process divided by the number of processes, over it. The difference is
the norm of that between outputs and gradients and those of all_gather, relative to the latter.
`--tiny` compares small shapes on CPUs, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch import Tensor

EXCHANGES = ("all_gather", "a2a", "p2p")


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8, help="key heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tiny", action="store_true", help="small shapes on CPUs")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.tiny else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not arguments.tiny:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("gloo" if arguments.tiny else "nccl")

    from megatron_wrap.platform import choose_platform

    choose_platform("cpu" if arguments.tiny else "cuda").install()
    for name, lengths in shapes(arguments.tiny).items():
        measure(name, lengths, arguments, device)
    torch.distributed.destroy_process_group()


def shapes(tiny: bool) -> dict[str, list[int]]:
    """Lengths of the sequences in a row; several: a packed row."""
    unit = 2 * torch.distributed.get_world_size()
    scale = 64 if tiny else 1
    generator = random.Random(5)
    packed: list[int] = []
    while sum(packed) < 32768 // scale:
        packed.append(unit * generator.randint(32 // min(scale, 32), 4096 // scale // 2))
    return {
        **{f"{length:,} tokens": [length] for length in (8192 // scale, 32768 // scale)},
        f"{sum(packed):,} tokens in {len(packed)} packed sequences": packed,
    }


def measure(name: str, lengths: list[int], arguments: argparse.Namespace, device: torch.device) -> None:
    """One shape."""
    from megatron_wrap.nn.packed_sequences import PackedSequences
    from megatron_wrap.parallel.zigzag import packed_positions

    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    generator = torch.Generator(device).manual_seed(3)
    whole = [
        torch.randn(sum(lengths), 1, heads, arguments.head_size, device=device, generator=generator).bfloat16()
        for heads in (arguments.heads, arguments.groups, arguments.groups, arguments.heads)
    ]

    def boundaries(processes: int) -> Any:
        if len(lengths) == 1:
            return None
        return PackedSequences.of(lengths, processes, rank % processes).moved(lambda tensor: tensor.to(device))

    alone = passes(core(None, arguments), whole, boundaries(1))
    ideal = median_ms(alone, device) / size
    say({"shape": name, "exchange": "none", "ms": round(ideal, 3)})
    positions = packed_positions(lengths, size, rank).to(device)
    local, packed = [tensor[positions] for tensor in whole], boundaries(size)
    expected: list[Tensor] = []
    for exchange in EXCHANGES:
        run = passes(core(exchange, arguments), local, packed)
        results = run()
        expected = expected or results
        milliseconds = median_ms(run, device)
        differences = [
            float((mine.float() - theirs.float()).norm() / theirs.float().norm())
            for mine, theirs in zip(results, expected, strict=True)
        ]
        say(
            {
                **{"shape": name, "exchange": exchange, "ms": round(milliseconds, 3)},
                **{"of_ideal": round(ideal / milliseconds, 3), "difference": round(max(differences), 5)},
            }
        )


def core(exchange: str | None, arguments: argparse.Namespace) -> Any:
    """A layer's attention; None: of one process alone."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_wrap.nn.core_attention import TorchCoreAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=arguments.heads * arguments.head_size,
        num_attention_heads=arguments.heads,
        num_query_groups=arguments.groups,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    groups = None if exchange is None else SimpleNamespace(tp=None, cp=torch.distributed.group.WORLD)
    return TorchCoreAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=exchange, pg_collection=groups)


def passes(attention: Any, tensors: list[Tensor], packed: Any) -> Callable[[], list[Tensor]]:
    """A function of both passes, which returns output and gradients."""
    *inputs, grad = (tensor.clone() for tensor in tensors)

    def run() -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        output = attention(*leaves, None, packed_seq_params=packed)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.flatten(2))]

    return run


def median_ms(function: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Of a call with the device's work, all processes beginning together; the slowest process."""
    elapsed = []
    for _ in range(repeats + 3):
        torch.distributed.barrier()
        wait(device)
        started = time.perf_counter()
        function()
        wait(device)
        elapsed.append(1000 * (time.perf_counter() - started))
    slowest = torch.tensor(statistics.median(elapsed[3:]), device=device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    return float(slowest)


def wait(device: torch.device) -> None:
    """For the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def say(line: dict[str, object]) -> None:
    """Print a RESULT line on rank 0."""
    if torch.distributed.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
