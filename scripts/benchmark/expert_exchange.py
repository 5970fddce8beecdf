"""The exchange of tokens between expert-parallel processes: NCCL's all-to-all with sizes on the host, and torch's
symmetric memory with sizes on the device. An experiment; training uses the first.

    UB_SKIPMC=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 \\
        torchrun --nproc_per_node 2 scripts/benchmark/expert_exchange.py [--rows 16384 131072] [--hidden 2048]

Prints a RESULT line of rank 0 for each way and number of rows: the milliseconds of an exchange of random sizes, all
processes beginning together, and the milliseconds for which a call holds the host while the device has other work.
The rows that arrive are compared.
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

REPEATS = 20
QUEUED_CYCLES = 8_500_000
"""What the device still has to do when an exchange is called: about 5 ms at 1.7 GHz."""


def main() -> None:
    """Measure each way with each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16384, 131072], help="that each process sends")
    parser.add_argument("--hidden", type=int, default=2048)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    for number in arguments.rows:
        measure(number, arguments.hidden, device)
    torch.distributed.destroy_process_group()


def measure(number: int, hidden: int, device: torch.device) -> None:
    """Measure each way with `number` rows of `hidden` bfloat16 numbers of each process."""
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator(device).manual_seed(rank)
    rows = torch.randn(number, hidden, dtype=torch.bfloat16, device=device, generator=generator)
    targets = torch.randint(0, processes, (number,), device=device, generator=generator)
    sizes = targets.bincount(minlength=processes)
    received = exchanged(sizes)
    expected = by_nccl(rows, sizes, received)
    known = sizes.tolist(), received.tolist()
    report("NCCL, sizes exchanged and read by the host", lambda: by_nccl(rows, sizes, exchanged(sizes)), number)
    report("NCCL, sizes known", lambda: all_to_all(rows, *known), number)
    try:
        exchange, copied = symmetric_exchange(rows, sizes)
        for way, function in (("rows copied into it", copied), ("rows in it", exchange)):
            if not torch.equal(function()[: len(expected)], expected):
                raise RuntimeError("other rows have arrived")
            report(f"symmetric memory, sizes on the device, {way}", function, number)
    except Exception as error:  # also a result of the experiment
        say({"way": "symmetric memory", "rows": number, "failed": repr(error)[:300]})


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


def symmetric_exchange(rows: Tensor, sizes: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Functions that exchange the rows without the host: one of rows that are in symmetric memory, one that copies
    them there before. The rows that arrive are the first of the result, in symmetric memory, until the next exchange.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    if symmetric_memory.get_backend(rows.device) != "NVSHMEM":
        symmetric_memory.set_backend("NVSHMEM")
    name, processes = torch.distributed.group.WORLD.group_name, len(sizes)
    source = symmetric_memory.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    target = symmetric_memory.empty((processes * rows.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    of_source = symmetric_memory.empty(processes, dtype=torch.int64, device=rows.device)
    of_target = symmetric_memory.empty((2, processes), dtype=torch.int64, device=rows.device)
    for tensor in (source, target, of_source, of_target):
        symmetric_memory.rendezvous(tensor, group=name)

    def exchange() -> Tensor:
        of_source.copy_(sizes)
        torch.ops.symm_mem.all_to_all_vdev(source, target, of_source, of_target, name)
        return target

    def copied() -> Tensor:
        source.copy_(rows)
        return exchange()

    return exchange, copied


def report(way: str, function: Callable[[], object], number: int) -> None:
    """Print the median milliseconds of a call with the device's work, and of a call alone on a busy device."""
    elapsed = [milliseconds(function, queued=0)[1] for _ in range(REPEATS + 3)]
    held = [milliseconds(function, queued=QUEUED_CYCLES)[0] for _ in range(REPEATS + 3)]
    medians = {"ms": round(statistics.median(elapsed[3:]), 3), "host_held_ms": round(statistics.median(held[3:]), 3)}
    say({"way": way, "rows": number, **medians})


def milliseconds(function: Callable[[], object], queued: int) -> tuple[float, float]:
    """The milliseconds until the call returns, and until the device has done its work, all processes beginning
    together with `queued` cycles of other work on the device."""
    torch.distributed.barrier()
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(queued)
    started = time.perf_counter()
    function()
    returned = time.perf_counter()
    torch.cuda.synchronize()
    return 1000 * (returned - started), 1000 * (time.perf_counter() - started)


def say(line: dict[str, object]) -> None:
    """Print a RESULT line on rank 0."""
    if torch.distributed.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
