"""megatron-wrap beside other programs that train the same model on the same tokens, in turn, in one run.

    python scripts/benchmark/compare.py 1.5b-4096 [8b-layers-4096 1.5b-32768] [a.b=c ...]
        [--against trainer,trainer-flex,trainer-liger,trainer-liger-fp32,bare,bare-best,trl] [--liger]
        [--output outputs/compare] [--compare OLD.json]
        [--variant "ours-torch: megatron_lm.model.arch.transformer_impl=torch"] [--tree "ours-before: ../checkout"]

Takes presets (`comparison/presets.py`) or paths of runs. Writes compare.json, compare.md and compare.png; exits with 1
where --compare finds a regression. Each program is a set of processes of its own that holds the GPUs only in its turn.
`--tree` measures the megatron-wrap of another checkout, `--liger` this one with Liger-Kernel's RMSNorm. Trainers have
bf16 weights and moments; `trainer-liger-fp32` has fp32 ones, as ours, and bf16 products by autocast.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from comparison.flags import Flags, changes, default_flags, fastest
from comparison.pool import Launch, Program, Programs
from comparison.presets import PRESETS
from comparison.report import draw, markdown, reference_of, regressions, summary
from comparison.task import Task, task_of

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.core import exit_on_user_error
from megatron_wrap.errors import ConfigError

HERE = Path(__file__).resolve().parent
AGAINST = {
    "trainer": "transformers",
    "trainer-flex": "transformers-flex",
    "trainer-liger": "transformers-liger",
    "trainer-liger-fp32": "transformers-liger-fp32",
    "bare": "megatron-core",
    "bare-best": "megatron-core",
    "trl": "trl",
}
"""Name of a program in the tables -> the processes that run it."""
BY_DEFAULT = ("trainer", "bare", "bare-best", "trl")
WITH_ADAPTERS = ("trainer", "trainer-flex", "trainer-liger")
"""The programs that train adapters, and samples of unequal lengths."""
PACKAGES = (
    *("torch", "megatron-core", "transformer-engine", "transformers", "trl", "peft", "liger-kernel"),
    *("torchao", "flash-linear-attention", "fla-core", "megatron-wrap"),
)


def main() -> int:
    """Measure, write, compare."""
    arguments = parse()
    cuda = torch.cuda.is_available() and arguments.platform != "cpu"
    device = "cuda" if cuda else "cpu"
    world_size = arguments.devices or (torch.cuda.device_count() if cuda else 1)
    runs = runs_of(arguments)
    against = [name for name in arguments.against.split(",") if name and _is_installed(name)]
    output = Path(arguments.output)
    tasks = {name: read_task(name, arguments, device, world_size) for name in arguments.presets}
    processes = {AGAINST[name]: Launch(AGAINST[name]) for name in against}
    processes |= {process: launch for process, launch, _ in runs.values()}
    results: dict[str, Any] = {**description(device, world_size), "presets": {}}
    started = time.monotonic()
    with Programs(processes, world_size, device, output / "logs") as programs:
        print(f"programs are ready after {time.monotonic() - started:.0f} s", flush=True)
        for name, task in tasks.items():
            results["presets"][name] = measure(task, programs, runs, against, arguments)
            (output / "compare.json").write_text(json.dumps(results, indent=1) + "\n")  # nothing is lost later
    results["total_seconds"] = round(time.monotonic() - started)
    write(results, output)
    if arguments.compare is None:
        return 0
    lines, worse = regressions(results, json.loads(Path(arguments.compare).read_text()), arguments.threshold)
    print("\n".join([*lines, f"{worse} regressions of more than {arguments.threshold:.0%} since {arguments.compare}"]))
    return 1 if worse else 0


def parse() -> argparse.Namespace:
    """The command line, with `presets` and `overrides` apart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("presets_and_overrides", nargs="+", metavar="PRESET|CONFIG|a.b=c")
    parser.add_argument("--against", default=",".join(BY_DEFAULT), help=f"of {', '.join(AGAINST)}")
    parser.add_argument("--variant", action="append", default=[], metavar='"ours-NAME: a.b=c ..."')
    parser.add_argument("--tree", action="append", default=[], metavar='"ours-NAME: FOLDER"', help="another checkout")
    parser.add_argument("--liger", action="store_true", help="ours-liger: RMSNorm of liger-kernel")
    parser.add_argument("--devices", type=int, default=0, help="processes (default: one for each GPU; one on a CPU)")
    parser.add_argument("--platform", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--fresh", action="store_true", help="new processes for each run: for models that fill the GPU")
    parser.add_argument("--changes", metavar="NAME,...", help="what the search for bare-best tries (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a round before those; 0 times the start, too")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one program in one round")
    parser.add_argument("--output", default="outputs/compare", metavar="FOLDER")
    parser.add_argument("--compare", metavar="OLD.json", help="compare.json of an earlier run")
    parser.add_argument("--threshold", type=float, default=0.02, help="share that counts as a regression")
    arguments = parser.parse_intermixed_args()
    texts = arguments.presets_and_overrides
    arguments.presets = [text for text in texts if "=" not in text]
    arguments.overrides = [text for text in texts if "=" in text]
    unknown = set(arguments.against.split(",")) - {*AGAINST, ""}
    if unknown or not arguments.presets:
        parser.error(f"unknown in --against: {sorted(unknown)}" if unknown else "name a preset or a run's YAML")
    return arguments


def runs_of(arguments: argparse.Namespace) -> dict[str, tuple[str, Launch, list[str]]]:
    """Each run of megatron-wrap by name: its process, how that is started, and its overrides."""
    ours = ("megatron-wrap", Launch("megatron-wrap"))
    runs: dict[str, tuple[str, Launch, list[str]]] = {"ours": (*ours, [])}
    for name, overrides in map(_named, arguments.variant):
        runs[name] = (*ours, shlex.split(overrides))
    for name, folder in map(_named, arguments.tree):
        runs[name] = (name, Launch("megatron-wrap", Path(folder).resolve()), [])
    if arguments.liger:
        runs["ours-liger"] = ("megatron-wrap-liger", Launch("megatron-wrap-liger"), [])
    return runs


def _named(text: str) -> tuple[str, str]:
    """("ours-NAME", rest) of --variant and --tree."""
    name, _, rest = text.partition(":")
    if not name.startswith("ours-") or not rest.strip():
        raise ConfigError(f'{text!r} is not "ours-NAME: a.b=c" (--variant) or "ours-NAME: FOLDER" (--tree)')
    return name.strip(), rest.strip()


def _is_installed(name: str) -> bool:
    package = {"trainer": "transformers", "trl": "trl"}.get(name, "liger_kernel" if "liger" in name else None)
    if package is None or importlib.util.find_spec(package):
        return True
    print(f"{name} is left out: {package} is not installed")
    return False


def read_task(name: str, arguments: argparse.Namespace, device: str, world_size: int) -> Task:
    """The task of a preset or of a run's YAML."""
    preset = PRESETS.get(name)
    path = str(HERE / preset.config if preset else Path(name).resolve())  # a --tree has another working directory
    settings = (f"megatron_wrap.init.platform={device}", "megatron_wrap.logger.progress_bar=false")
    folder = f"megatron_wrap.logger.output_dir={Path(arguments.output, 'run').resolve()}"
    overrides = (*(preset.overrides if preset else ()), *settings, folder, *arguments.overrides)
    config = read_run(path, overrides)
    return task_of(config, path, overrides, device, world_size, arguments.warmup, arguments.steps)


def measure(
    task: Task,
    programs: Mapping[str, Program],
    runs: Mapping[str, tuple[str, Launch, list[str]]],
    against: list[str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """All programs on one task: the search for the bare loop's flags, then rounds in alternating order."""
    if task.lora_rank or task.mixed_lengths:
        against = [name for name in against if name in WITH_ADAPTERS]
    if task.model_parallel > 1:
        against = [name for name in against if AGAINST[name] == "megatron-core"]
    if task.no_bare_loop and any(AGAINST[name] == "megatron-core" for name in against):
        against = [name for name in against if AGAINST[name] != "megatron-core"]
        print(f"the bare loop is left out: it has no model with {task.no_bare_loop}", flush=True)
    default = default_flags(task.platform)
    best, sweep = default, []
    if "bare-best" in against:
        best, sweep = search(task, programs["megatron-core"], default, arguments)
    options: dict[str, tuple[str, dict[str, Any]]] = {
        name: (process, {"overrides": overrides}) for name, (process, _, overrides) in runs.items()
    }
    options |= {name: (AGAINST[name], {"trainer": AGAINST[name]}) for name in against}
    options |= {
        name: ("megatron-core", {"flags": flags.as_json()})
        for name, flags in (("bare", default), ("bare-best", best))
        if name in against
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options}
    for turn in range(arguments.rounds):
        for name in list(options)[:: -1 if turn % 2 else 1]:
            process, settings = options[name]
            result = programs[process].run(task, settings, arguments.timeout)
            if arguments.fresh:
                programs[process].restart()
            results[name].append(result)
            print(f"round {turn + 1}, {name}: {line(task, result)}", flush=True)
    summaries = {
        name: summary(rounds, task.tokens_per_step, task.world_size, task.tflops) for name, rounds in results.items()
    }
    return {
        "description": sizes(task),
        "task": task.as_json(),
        "reference": reference_of(summaries),
        "programs": summaries,
        "sweep": sweep,
        "runs": results,
    }


def search(
    task: Task, bare: Program, start: Flags, arguments: argparse.Namespace
) -> tuple[Flags, list[dict[str, Any]]]:
    """The bare loop's fastest flags, by fewer steps than a round has."""
    short = Task(**{**task.as_json(), "warmup": 1, "steps": 3})

    def seconds_of(name: str, flags: Flags) -> float | str:
        result = bare.run(short, {"flags": flags.as_json()}, arguments.timeout)
        if arguments.fresh:
            bare.restart()
        print(f"flags of the bare loop, {name}: {line(short, result)}", flush=True)
        return result["error"] if "error" in result else statistics.median(result["step_seconds"])

    candidates = changes(start, task)
    chosen = None if arguments.changes is None else arguments.changes.split(",")
    try:
        return fastest(start, [pair for pair in candidates if chosen is None or pair[0] in chosen], seconds_of)
    except RuntimeError as error:
        return start, [{"change": "default flags", "flags": start.as_json(), "error": str(error)}]


def line(task: Task, result: Mapping[str, Any]) -> str:
    """One run in words."""
    if "error" in result:
        return str(result["error"])
    seconds = statistics.median(result["step_seconds"])
    return (
        f"{task.tokens_per_step / seconds / task.world_size:,.0f} tokens/s, {task.tflops(seconds):.4g} TFLOP/s, "
        f"{result['peak_memory_gib']:.1f} GiB, loss {result['losses'][0]:.3f} to {result['losses'][-1]:.3f}"
    )


def sizes(task: Task) -> str:
    """The task in words."""
    devices = f"{task.world_size} device{'s' * (task.world_size > 1)}"
    width = f"FFN {task.ffn_hidden_size}"
    if task.num_experts:
        balance = "forced balance" if task.forced_balance else "the model's own routing"
        width = f"{task.num_experts} experts of width {task.expert_width}, {task.experts_per_token} a token, {balance}"
        width += f", a shared expert of width {task.shared_expert_width}" if task.shared_expert_width else ""
        devices += f", expert parallelism {task.expert_parallel}"
    split = {"tensor": task.tensor_parallel, "context": task.context_parallel, "pipeline": task.pipeline_parallel}
    devices += "".join(f", {kind} parallelism {size}" for kind, size in split.items() if size > 1)
    devices += f", {task.virtual_stages} chunks a stage" if task.virtual_stages > 1 else ""
    heads = f"{task.num_query_groups} key and value heads"
    sliding = task.hf_config.get("layer_types", []).count("sliding_attention")
    if sliding:
        heads += f", windows of {task.hf_config['sliding_window']} in {sliding} layers"
    if task.kv_lora_rank:
        heads = f"latent attention of ranks {task.q_lora_rank} and {task.kv_lora_rank}"
    if task.lora_rank:
        width += f", adapters of rank {task.lora_rank} beside all linear layers"
    length = f"sequence {task.seq_length:,}"
    if task.mixed_lengths:
        mean = task.tokens_per_step / task.global_batch_size
        length = f"sequences of {mean:,.0f} tokens in the mean and {task.seq_length:,} at most, packed"
    return (
        f"{task.hf_config['model_type']}, {task.num_layers} layers, hidden {task.hidden_size}, {width}, "
        f"{task.num_attention_heads} heads, {heads}, vocabulary {task.vocab_size:,}; {length}, "
        f"micro-batch {task.micro_batch_size}, {task.global_batch_size} sequences a step, "
        f"{'bf16' if task.bf16 else 'fp32'}, {devices}; {task.steps} steps a round after "
        f"{task.warmup} of warm-up."
    )


def description(device: str, world_size: int) -> dict[str, Any]:
    """Where, when and with what a comparison runs."""
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
    """compare.json, compare.md and compare.png; prints the tables."""
    (output / "compare.json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    (output / "compare.md").write_text(text)
    print(f"\n{text}")
    problem = draw(results, output / "compare.png")
    print(problem or f"{output}: compare.json, compare.md, compare.png; {results['total_seconds']} s in all")


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
