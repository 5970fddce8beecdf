"""Bandwidth of the collectives that tensor and sequence parallelism wait for, over all processes; one JSON line.

torchrun --nproc-per-node 4 scripts/benchmark/link_speed.py

The figure is nccl-tests' bus bandwidth: bytes that each process must receive over the time taken.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

MIB = 2**20


def main() -> None:
    """All-gather, reduce-scatter and all-reduce of 32 MiB in bf16, medians of 20."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    size = dist.get_world_size()
    whole = torch.ones(32 * MIB // 2, dtype=torch.bfloat16, device="cuda")
    part = whole.chunk(size)[0].clone()
    share = whole.numel() * 2 * (size - 1) / size
    calls = {
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), share),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), share),
        "all_reduce": (lambda: dist.all_reduce(whole), 2 * share),
    }
    report: dict[str, object] = {"processes": size}
    for name, (call, received) in calls.items():
        seconds = []
        for _ in range(25):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        report[f"{name}_gb_per_second"] = round(received / sorted(seconds[5:])[10] / 1e9, 1)
    if dist.get_rank() == 0:
        sys.stdout.write("RESULT link-speed " + json.dumps(report) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
