"""One process of one program: reads a task from each line of stdin, trains, frees the device, writes a line.

python -m comparison.worker PROGRAM, started by `comparison.pool`. Lines of the protocol begin with MARK, because
libraries also print.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from comparison.task import Outcome, Task

MARK = "@compare "
PROGRAMS = {
    "megatron-wrap": "comparison.with_megatron_wrap",
    "megatron-core": "comparison.with_megatron_core",
    "transformers": "comparison.with_trainer",
    "transformers-flex": "comparison.with_trainer",
    "transformers-liger": "comparison.with_trainer",
    "transformers-liger-fp32": "comparison.with_trainer",
    "trl": "comparison.with_trainer",
}
_IMPORTED_EARLY = {
    "megatron-wrap": ("megatron_wrap.engine.step",),
    "trl": ("trl", "datasets"),
}
"""Program -> slow modules, which are imported while others train instead of in the first run."""
_MEGATRON_CORE = (
    *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer", "megatron.core.distributed"),
    *("megatron.core.pipeline_parallel.schedules", "torch._dynamo", "torch._inductor.compile_fx"),
)
"""Modules of Megatron-Core with Transformer Engine, and modules that torch.compile imports when it compiles
Megatron-Core's fused functions."""
_OURS = (
    *_MEGATRON_CORE,
    *("megatron_wrap.core.after_step", "megatron_wrap.setup.build", "megatron_wrap.model.gpt_provider"),
)
_ON_GPU = {"megatron-core": _MEGATRON_CORE, "megatron-wrap": _OURS}
"""Program -> further modules to import early on a GPU. On a CPU the run itself imports Megatron-Core, with the changes
that make it run there."""


def main(program: str) -> None:
    """Serve until stdin closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # into the log, where `comparison.pool` waits in vain
    sys.modules["jax"] = None  # type: ignore[assignment]  # Transformer Engine would import it, for seconds
    module = importlib.import_module(PROGRAMS[program])
    on_gpu = _ON_GPU.get(program, ()) if torch.cuda.is_available() else ()
    for name in (*_IMPORTED_EARLY.get(program, ()), *on_gpu):
        importlib.import_module(name)
    _say({"ready": program})
    for line in sys.stdin:
        order = json.loads(line)
        task = Task(**order["task"])
        if order["queues"] is not None:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = order["queues"]  # before the first use of the device
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
    before = _allocated_gib(cuda)
    outcome: Outcome | None = None
    try:
        outcome = module.run(task, options)
    except Exception as error:
        traceback.print_exc()
        first = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
        problem = f"{type(error).__name__}: {first}"
    if outcome is None:  # only now is the error gone, whose frames hold the model
        return {"error": problem, "left_gib": _release(cuda)}
    peak = torch.cuda.max_memory_allocated() / 2**30 - before if cuda else _peak_resident_gib()
    left = _release(cuda)
    return {
        "step_seconds": outcome.step_seconds,
        "losses": outcome.losses,
        "notes": outcome.notes,
        "peak_memory_gib": peak,
        "left_gib": left,
    }


def _release(cuda: bool) -> float:
    """Free the memory that the run left; returns the GiB of the GPU that could not be freed."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return _allocated_gib(cuda)


def _allocated_gib(cuda: bool) -> float:
    return torch.cuda.memory_allocated() / 2**30 if cuda else 0.0


def _peak_resident_gib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**20


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
