"""The exchange of tokens between expert-parallel processes: NCCL's all-to-all with sizes on the host, and torch's
symmetric memory with sizes on the device. An experiment; training uses the first.

    UB_SKIPMC=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 \\
        torchrun --nproc_per_node 2 scripts/benchmark/expert_exchange.py [--tokens 16384] [--hidden 2048]

Prints a RESULT line of rank 0 for each way: milliseconds of an exchange of random sizes with the exchange of the sizes,
and of one whose sizes are known. The rows that arrive are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor


def main() -> None:
    """Measure both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of each process")
    parser.add_argument("--hidden", type=int, default=2048)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator(device).manual_seed(rank)
    rows = torch.randn(arguments.tokens, arguments.hidden, dtype=torch.bfloat16, device=device, generator=generator)
    targets = torch.randint(0, processes, (arguments.tokens,), device=device, generator=generator)
    sizes = targets.bincount(minlength=processes)
    received = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(received, sizes)
    expected = by_nccl(rows, sizes, received)
    report("NCCL, sizes exchanged and read by the host", lambda: by_nccl(rows, sizes, exchanged(sizes)), rank)
    known = sizes.tolist(), received.tolist()
    report("NCCL, sizes known", lambda: all_to_all(rows, *known), rank)
    try:
        on_device = symmetric_exchange(rows, sizes)
        on_device()
        torch.cuda.synchronize()
        if not torch.equal(on_device()[: len(expected)], expected):
            raise RuntimeError("other rows have arrived")
        report("symmetric memory, sizes on the device", on_device, rank)
    except Exception as error:  # also a result of the experiment
        say(rank, {"way": "symmetric memory", "failed": repr(error)[:300]})
    torch.distributed.destroy_process_group()


def exchanged(sizes: Tensor) -> Tensor:
    """The numbers of rows that arrive from each process."""
    received = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(received, sizes)
    return received


def by_nccl(rows: Tensor, sizes: Tensor, received: Tensor) -> Tensor:
    """The rows that arrive, after a wait for the sizes."""
    numbers = torch.stack([sizes, received]).tolist()
    return all_to_all(rows, *numbers)


def all_to_all(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """The rows that arrive."""
    output = rows.new_empty(sum(receive), rows.shape[1])
    torch.distributed.all_to_all_single(output, rows, receive, send)
    return output


def symmetric_exchange(rows: Tensor, sizes: Tensor) -> Callable[[], Tensor]:
    """A function that exchanges the rows without the host; the rows that arrive are the first of its result."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.set_backend("NVSHMEM")
    name, processes = torch.distributed.group.WORLD.group_name, len(sizes)
    source = symmetric_memory.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    target = symmetric_memory.empty((processes * rows.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    of_source = symmetric_memory.empty(processes, dtype=torch.int64, device=rows.device)
    of_target = symmetric_memory.empty((2, processes), dtype=torch.int64, device=rows.device)
    for tensor in (source, target, of_source, of_target):
        symmetric_memory.rendezvous(tensor, group=name)

    def exchange() -> Tensor:
        source.copy_(rows)
        of_source.copy_(sizes)
        torch.ops.symm_mem.all_to_all_vdev(source, target, of_source, of_target, name)
        return target

    return exchange


def report(way: str, function: Callable[[], object], rank: int, repeats: int = 20) -> None:
    """Print the median milliseconds of a call with the device's work, all processes beginning together."""
    elapsed = []
    for _ in range(repeats + 3):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        elapsed.append(1000 * (time.perf_counter() - started))
    say(rank, {"way": way, "ms": round(statistics.median(elapsed[3:]), 3)})


def say(rank: int, line: dict[str, object]) -> None:
    """Print a RESULT line on rank 0."""
    if rank == 0:
        sys.stdout.write("RESULT " + json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
