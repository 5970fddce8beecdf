"""Time and peak memory of beginning from a Hugging Face folder and of writing one, on each process.

python scripts/benchmark/hugging_face.py make FOLDER [ARCHITECTURE [float32 | bfloat16]]     # a random model
torchrun --nproc-per-node 2 scripts/benchmark/hugging_face.py run FOLDER EXPORT [a.b.c=value ...]

Peak memory is the largest resident set since the configuration was read, pages of open files included, over that
before; `share` is the size of this process's parameters. Linux.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_wrap.core import MegatronWrap, exit_on_user_error

CONFIG = Path(__file__).with_name("hugging_face.yaml")
MIB = 2**20


def make(folder: str, architecture: str = "llama3.2-1b", dtype: str = "float32") -> None:
    """Write a model of a shipped architecture with weights from the seed."""
    select = [f"megatron_lm.model.arch.__select__={architecture}"]
    with MegatronWrap(CONFIG, [*select, *_precision(dtype)]) as wrap:
        wrap.initialize()
        wrap.setup_model()
        wrap.save_pretrained(folder, max_shard_size="1GB")


def run(folder: str, export: str, *overrides: str) -> None:
    """Load, then export; one JSON line for each process."""
    dtype = json.loads((Path(folder) / "config.json").read_text())["dtype"]
    with MegatronWrap.from_pretrained(folder, CONFIG, [*_precision(dtype), *overrides]) as wrap:
        wrap.initialize()
        load = _measured(wrap.setup_model)
        share = sum(p.numel() * p.element_size() for chunk in wrap.state.chunks for p in chunk.parameters()) / MIB
        before = _status("VmRSS")
        write = _measured(lambda: wrap.save_pretrained(export, max_shard_size="1GB"))
        report = {
            "rank": wrap.state.parallel.world.rank,
            "layout": wrap.state.parallel.layout,
            "share_mib": round(share),
            "load_seconds": load[0],
            "load_peak_mib": load[1],
            "load_peak_over_share": round(load[1] / share, 3),
            "export_seconds": write[0],
            "export_peak_mib": write[1],
            "export_peak_with_model_over_share": round((write[1] + share) / share, 3),
            "resident_before_export_mib": round(before),
        }
        sys.stdout.write(json.dumps(report) + "\n")


def _precision(dtype: str) -> list[str]:
    return [f"megatron_lm.train.dtype.__select__={'bf16' if dtype == 'bfloat16' else 'fp32'}"]


def _measured(action: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and by how much the resident set grew at most, MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (man proc_pid_clear_refs)
    before, started = _status("VmRSS"), time.perf_counter()
    action()
    return round(time.perf_counter() - started, 2), round(_status("VmHWM") - before)


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))


if __name__ == "__main__":
    with exit_on_user_error():
        {"make": make, "run": run}[sys.argv[1]](*sys.argv[2:])
