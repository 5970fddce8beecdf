"""megatron-wrap compared with other programs that train the same model on the same tokens, in turn, in one run.

    python scripts/benchmark/compare.py 1.5b-4096 [8b-layers-4096 1.5b-32768] [a.b=c ...]
        [--against trainer,trainer-flex,trainer-liger,trainer-liger-fp32,bare,bare-best,trl]
        [--output outputs/compare] [--compare OLD.json]
        [--variant "ours-torch: megatron_lm.model.arch.transformer_impl=torch"] [--tree "ours-before: ../checkout"]
    python scripts/benchmark/compare.py --tasks FILE [--devices 2] [--limit 500]    (lines "NAME: PRESET [options]")

Takes presets (`comparison/presets.py`) or paths of runs. Writes compare.json and compare.md; exits with 1 where
--compare finds a regression. Each program is a set of processes of its own that holds the GPUs only in its turn,
and trains all tasks; each line of --tasks has options like those of the command line, which has their defaults. A task
with fewer --devices trains as often side by side as the devices allow, and its times are the means.
`--tree` measures the megatron-wrap of another checkout. Trainers have bf16 weights and moments; `trainer-liger-fp32`
has fp32 ones, as ours, and bf16 products by autocast.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from comparison.arguments import AGAINST, against_of, parse, runs_of
from comparison.measure import Turns, measure, starting_flags
from comparison.pool import Launch, Programs
from comparison.presets import PRESETS
from comparison.report import markdown, regressions
from comparison.task import Task, task_of

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.core import exit_on_user_error
from megatron_wrap.errors import MegatronWrapError

HERE = Path(__file__).resolve().parent
PACKAGES = (
    *("torch", "megatron-core", "transformer-engine", "transformers", "trl", "peft", "liger-kernel"),
    *("torchao", "flash-linear-attention", "fla-core", "megatron-wrap"),
)


def main() -> int:
    """Measure, write, compare."""
    arguments, jobs = parse((__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available() and arguments.platform != "cpu"
    device = "cuda" if cuda else "cpu"
    world_size = arguments.devices or (torch.cuda.device_count() if cuda else 1)
    output = Path(arguments.output)
    tasks, refused = read_tasks(jobs, device, world_size)
    jobs = {name: jobs[name] for name in tasks}
    runs = {name: runs_of(job) for name, job in jobs.items()}
    against = {name: against_of(job) for name, job in jobs.items()}
    processes = {AGAINST[name]: Launch(AGAINST[name]) for names in against.values() for name in names}
    processes |= {process: launch for task_runs in runs.values() for process, launch, _ in task_runs.values()}
    results: dict[str, Any] = {**description(device, world_size), "presets": {}}
    started = time.monotonic()
    with Programs(processes, world_size, device, output / "logs", arguments.standby) as programs:
        print(f"programs are ready after {time.monotonic() - started:.0f} s", flush=True)
        for name, task in tasks.items():
            start = starting_flags(task, jobs[name])
            turns = Turns(task, name, programs, jobs[name], started + arguments.limit, start)
            folder = output.resolve() / "run" / name.replace("/", "-")
            results["presets"][name] = measure(turns, runs[name], against[name], str(folder))
            (output / "compare.json").write_text(json.dumps(results, indent=1) + "\n")  # nothing is lost later
    results["total_seconds"] = round(time.monotonic() - started)
    write(results, output)
    if arguments.compare is None:
        return 1 if refused else 0
    lines, worse = regressions(results, json.loads(Path(arguments.compare).read_text()), arguments.threshold)
    print("\n".join([*lines, f"{worse} regressions of more than {arguments.threshold:.0%} since {arguments.compare}"]))
    return 1 if worse or refused else 0


def read_tasks(jobs: Mapping[str, Namespace], device: str, world_size: int) -> tuple[dict[str, Task], int]:
    """The tasks by name, and how many of a list were refused, each with a line."""
    tasks, refused = {}, 0
    for name, job in jobs.items():
        try:
            task = read_task(job, device, job.devices or world_size)
            starting_flags(task, job)
            tasks[name] = task
        except MegatronWrapError as error:
            if job.tasks is None:
                raise
            refused += 1
            print(f"{name} is left out: {error}", flush=True)
    return tasks, refused


def read_task(job: Namespace, device: str, world_size: int) -> Task:
    """The task of a preset, or of a run's YAML."""
    preset = PRESETS.get(job.preset)
    path = str(HERE / preset.config if preset else Path(job.preset).resolve())  # a --tree has another working directory
    settings = (f"megatron_wrap.init.platform={device}", "megatron_wrap.logger.progress_bar=false")
    overrides = (*(preset.overrides if preset else ()), *settings, *job.overrides)
    return task_of(read_run(path, overrides), path, overrides, device, world_size, job.warmup, job.steps)


def description(device: str, world_size: int) -> dict[str, Any]:
    """Date, hardware, versions and command of a comparison."""
    if device == "cuda":
        hardware = f"{world_size} x {torch.cuda.get_device_name(0)}"
    else:
        hardware = f"{world_size} CPU processes ({platform.machine()})"
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware,
        "versions": {"Python": platform.python_version(), **versions},
        "command": " ".join(["python", "scripts/benchmark/compare.py", *map(shlex.quote, sys.argv[1:])]),
    }


def write(results: Mapping[str, Any], output: Path) -> None:
    """Write compare.json and compare.md, and print the tables."""
    (output / "compare.json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    (output / "compare.md").write_text(text)
    print(f"\n{text}")
    print(f"{output}: compare.json, compare.md; {results['total_seconds']} s in all")


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
