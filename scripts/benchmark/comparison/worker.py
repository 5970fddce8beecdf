"""One process of one program: reads a task from each line of stdin, trains, frees the device, writes a line.

python -m comparison.worker PROGRAM, started by `comparison.pool`. Lines of the protocol begin with MARK, because
libraries also print.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from comparison.task import Outcome, Task

MARK = "@compare "
PROGRAMS = {
    "megatron-wrap": "comparison.with_megatron_wrap",
    "megatron-wrap-liger": "comparison.with_liger",
    "megatron-core": "comparison.with_megatron_core",
    "transformers": "comparison.with_trainer",
    "transformers-flex": "comparison.with_trainer",
    "transformers-liger": "comparison.with_trainer",
    "transformers-liger-fp32": "comparison.with_trainer",
    "trl": "comparison.with_trainer",
}
_IMPORTED_EARLY = {
    "megatron-core": ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer"),
    "megatron-wrap": ("megatron_wrap.engine.step",),
    "megatron-wrap-liger": ("megatron_wrap.engine.step",),
    "trl": ("trl", "datasets"),
}
"""Slow imports, done before the first run is timed."""


def main(program: str) -> None:
    """Serve until stdin closes."""
    module = importlib.import_module(PROGRAMS[program])
    early = _IMPORTED_EARLY.get(program, ())
    if program == "megatron-core" and not torch.cuda.is_available():
        early = ()  # on a CPU Megatron-Core is imported with the changes that make it run there
    for name in early:
        importlib.import_module(name)
    _say({"ready": program})
    for line in sys.stdin:
        order = json.loads(line)
        task = Task(**order["task"])
        os.environ["MASTER_PORT"] = str(order["port"])  # a new port for each start of torch.distributed
        if "RANK" in os.environ:  # LOCAL_RANK stays the index of its device
            os.environ |= {"RANK": str(order["rank"]), "WORLD_SIZE": str(task.world_size)}
        _say(_result(module, task, order["options"]))


def _result(module: Any, task: Task, options: dict[str, Any]) -> dict[str, Any]:
    cuda = task.platform == "cuda"
    if cuda:
        torch.cuda.set_device(task.device)
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (man proc_pid_clear_refs)
    outcome: Outcome | None = None
    try:
        outcome = module.run(task, options)
    except Exception as error:
        traceback.print_exc()
        first = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
        problem = f"{type(error).__name__}: {first}"
    if outcome is None:  # only now is the error gone, whose frames hold the model
        return {"error": problem, "left_gib": _release(cuda)}
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else _peak_resident_gib()
    return {
        "step_seconds": outcome.step_seconds,
        "losses": outcome.losses,
        "notes": outcome.notes,
        "peak_memory_gib": peak,
        "left_gib": _release(cuda),
    }


def _release(cuda: bool) -> float:
    """Free what the run left; returns the GiB of the GPU that could not be freed."""
    gc.collect()
    if not cuda:
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**30


def _peak_resident_gib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**20


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
