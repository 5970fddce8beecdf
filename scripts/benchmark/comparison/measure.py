"""Measures the programs on one task, in turn."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comparison.arguments import AGAINST, Runs
from comparison.flags import Flags, changed, changes, default_flags, fastest
from comparison.pool import Program
from comparison.report import reference_of, summary
from comparison.task import Task

WITH_ADAPTERS = ("trainer", "trainer-flex", "trainer-liger")
"""Programs that train adapters, and samples of unequal lengths."""
_SHORTEST_SECONDS = 5
"""Smallest remaining time in seconds with which a run begins."""


@dataclass(frozen=True)
class Turns:
    """Runs of programs on one task, one after the other; each prints a line."""

    task: Task
    name: str
    """Name of the task."""
    programs: Mapping[str, Program]
    arguments: argparse.Namespace
    """Parsed arguments of the task."""
    end: float
    """Value of `time.monotonic()` after which no run starts."""
    start: Flags
    """Flags of bare-best before the search."""

    def run(self, title: str, process: str, settings: dict[str, Any], task: Task | None = None) -> dict[str, Any]:
        """Run a program on the task, and print a line; returns the answer of `Program.run`. `task` replaces that of all
        turns."""
        task, begun = task or self.task, time.monotonic()
        left = self.end - begun
        result: dict[str, Any] = {"error": "no time is left"}
        if left > _SHORTEST_SECONDS:
            result = self.programs[process].run(task, settings, self.arguments.timeout, left)
            if self.arguments.fresh:
                self.programs[process].restart()
        print(f"{title} on {self.name}: {line(task, result)} ({time.monotonic() - begun:.1f} s)", flush=True)
        return result


def measure(turns: Turns, runs: Runs, against: list[str], folder: str) -> dict[str, Any]:
    """Measure all programs on one task: the search for the bare loop's flags, then rounds in alternating order.

    Args:
        folder: receives the files of megatron-wrap's runs, in one folder each.
    """
    task, arguments = turns.task, turns.arguments
    against = _able(task, against)
    best, sweep, searched = search(turns) if "bare-best" in against else (turns.start, [], {})
    options: dict[str, tuple[str, dict[str, Any]]] = {
        name: (process, {"overrides": overrides, "folder": f"{folder}/{name}"})
        for name, (process, _, overrides) in runs.items()
    }
    options |= {name: (AGAINST[name], {"trainer": AGAINST[name]}) for name in against}
    bare = {
        name: flags for name, flags in (("bare", default_flags(task.platform)), ("bare-best", best)) if name in against
    }
    options |= {name: ("megatron-core", {"flags": flags.as_json()}) for name, flags in bare.items()}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options}
    for turn in range(arguments.rounds):
        for name in list(options)[:: -1 if turn % 2 else 1]:
            known = searched.get(bare[name]) if name in bare else None
            results[name].append(known or turns.run(f"round {turn + 1}, {name}", *options[name]))
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


def _able(task: Task, against: list[str]) -> list[str]:
    """Names of the other programs that can train the task."""
    if task.lora_rank or task.mixed_lengths:
        against = [name for name in against if name in WITH_ADAPTERS]
    if task.model_parallel > 1:
        against = [name for name in against if AGAINST[name] == "megatron-core"]
    if task.no_bare_loop and any(AGAINST[name] == "megatron-core" for name in against):
        against = [name for name in against if AGAINST[name] != "megatron-core"]
        print(f"the bare loop is left out: it has no model with {task.no_bare_loop}", flush=True)
    return against


def starting_flags(task: Task, arguments: argparse.Namespace) -> Flags:
    """The bare loop's flags before the search: the defaults with the changes that the command line names."""
    default = default_flags(task.platform)
    return default if not arguments.flags else changed(default, arguments.flags.split(","), task)


def search(turns: Turns) -> tuple[Flags, list[dict[str, Any]], dict[Flags, dict[str, Any]]]:
    """The bare loop's fastest flags, the trials, and the results that count as those of the round. With one round, the
    trials take as many steps as it does; with several, they take fewer, and none counts."""
    task, arguments, start = turns.task, turns.arguments, turns.start
    if arguments.flags is not None and arguments.changes is None:
        return start, [], {}
    one_round = arguments.rounds == 1
    short = task if one_round else Task(**{**task.as_json(), "warmup": 1, "steps": 3})
    results: dict[Flags, dict[str, Any]] = {}

    def seconds_of(name: str, flags: Flags) -> float | str:
        result = turns.run(f"flags of the bare loop, {name}", "megatron-core", {"flags": flags.as_json()}, short)
        if one_round:
            results[flags] = result
        return result["error"] if "error" in result else statistics.median(result["step_seconds"])

    candidates = changes(start, task)
    chosen = None if arguments.changes is None else arguments.changes.split(",")
    try:
        tried = [pair for pair in candidates if chosen is None or pair[0] in chosen]
        return *fastest(start, tried, seconds_of), results
    except RuntimeError as error:
        return start, [{"change": "starting flags", "flags": start.as_json(), "error": str(error)}], results


def line(task: Task, result: Mapping[str, Any]) -> str:
    """Description of a run's result on one line."""
    if "error" in result:
        return str(result["error"])
    seconds = statistics.median(result["step_seconds"])
    return (
        f"{task.tokens_per_step / seconds / task.world_size:,.0f} tokens/s, {task.tflops(seconds):.4g} TFLOP/s, "
        f"{result['peak_memory_gib']:.1f} GiB, loss {result['losses'][0]:.3f} to {result['losses'][-1]:.3f}, "
        f"{result['notes']}"
    )


def sizes(task: Task) -> str:
    """Description of the task's sizes."""
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
        width += f", adapters of rank {task.lora_rank} for all linear layers"
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
