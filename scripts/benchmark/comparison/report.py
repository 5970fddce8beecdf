"""Results of a comparison as a table, and regressions; nothing is measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

REFERENCES = ("bare-best", "bare", "trainer-liger", "trainer")
"""Programs that ratios refer to: the first of these that ran."""


def summary(runs: Sequence[Mapping[str, Any]], tokens_per_step: int, world_size: int, tflops: Any) -> dict[str, Any]:
    """One program's rounds as numbers.

    Args:
        runs: results of `Program.run`, one for each round.
        tflops: function of a step's seconds that returns TFLOP/s.

    Returns:
        Medians over all measured steps of all rounds, the slowest and fastest round's median, and the largest memory;
        or `error` where a round failed.
    """
    failed = next((run for run in runs if "error" in run), None)
    if failed is not None:
        return {"error": failed["error"]}
    seconds = statistics.median(second for run in runs for second in run["step_seconds"])
    medians = [statistics.median(run["step_seconds"]) for run in runs]
    return {
        "tokens_per_second_per_device": tokens_per_step / seconds / world_size,
        "step_seconds": seconds,
        "round_step_seconds": medians,
        "tflops": tflops(seconds),
        "peak_memory_gib": max(run["peak_memory_gib"] for run in runs),
        "left_gib": max(run["left_gib"] for run in runs),
        "first_loss": runs[0]["losses"][0],
        "last_loss": runs[0]["losses"][-1],
        "notes": runs[0]["notes"],
    }


def reference_of(programs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Name of the program that ratios refer to; None: none of `REFERENCES` ran."""
    return next((name for name in REFERENCES if name in programs and "error" not in programs[name]), None)


def ratios(programs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Speed of each program divided by that of the reference; empty without a reference."""
    reference = reference_of(programs)
    if reference is None:
        return {}
    speed = {
        name: program["tokens_per_second_per_device"] for name, program in programs.items() if "error" not in program
    }
    return {name: value / speed[reference] for name, value in speed.items()}


def round_ratios(programs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each other run of megatron-wrap: its speed divided by that of `ours`, by round."""
    ours = programs.get("ours")
    if ours is None or "error" in ours:
        return []
    lines = []
    for name, program in programs.items():
        if name.startswith("ours-") and "error" not in program:
            pairs = zip(ours["round_step_seconds"], program["round_step_seconds"], strict=True)
            ratio = [ours_seconds / seconds for ours_seconds, seconds in pairs]
            rounds = ", ".join(f"{value:.4f}" for value in ratio)
            lines.append(f"{name} over ours: {statistics.median(ratio):.4f} (rounds: {rounds})")
    return lines


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"Measured on {results['date']} on {results['hardware']}; {versions}.",
        "",
        "```sh",
        results["command"],
        "```",
    ]
    for name, preset in results["presets"].items():
        lines += ["", f"## {name}", "", preset["description"], "", *_table(preset["programs"])]
        if speeds := round_ratios(preset["programs"]):
            lines += ["", *(f"- {line}" for line in speeds)]
        if preset.get("sweep"):
            lines += ["", "Search for the fastest flags of the bare loop:", "", *_sweep_table(preset["sweep"])]
    return "\n".join(lines) + "\n"


def _table(programs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    reference, relative = reference_of(programs), ratios(programs)
    over_reference = f"over {reference}" if reference else "over"
    lines = [
        f"| program | tokens/s per device | {over_reference} | model TFLOP/s | step, s (rounds) | peak memory, GiB | "
        "loss, first to last step | with |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, program in programs.items():
        if "error" in program:
            lines.append(f"| {name} | {program['error'].replace('|', '/')} | | | | | | |")
            continue
        rounds = ", ".join(f"{seconds:.4g}" for seconds in program["round_step_seconds"])
        over = f"{relative[name]:.3f}" if name in relative else ""
        lines.append(
            f"| {name} | {program['tokens_per_second_per_device']:,.0f} | {over} | {program['tflops']:.4g} | "
            f"{program['step_seconds']:.4g} ({rounds}) | {program['peak_memory_gib']:.1f} | "
            f"{program['first_loss']:.3f} to {program['last_loss']:.3f} | {program['notes']} |"
        )
    return lines


def _sweep_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| tried | step, s |", "| --- | --- |"]
    for record in records:
        outcome = record.get("error") or f"{record['step_seconds']:.4g}"
        lines.append(f"| {record['change']} | {outcome.replace('|', '/')} |")
    return lines


def regressions(new: Mapping[str, Any], old: Mapping[str, Any], threshold: float) -> tuple[list[str], int]:
    """Compare two reports.

    Where both have the same reference program, on any hardware, speeds are compared as ratios to it, because times of
    two days differ for other reasons than the program. Without one, tokens per second are compared.

    Args:
        threshold: share by which the speed may fall, or the peak memory grow.

    Returns:
        A line for each program and preset that both have, and the number of regressions.
    """
    lines, count = [], 0
    for preset in (name for name in new["presets"] if name in old["presets"]):
        programs, before = new["presets"][preset]["programs"], old["presets"][preset]["programs"]
        reference = reference_of(programs)
        relative = reference is not None and reference == reference_of(before)
        for name in (name for name in programs if name in before):
            line, worse = _changed(name, programs, before, relative, threshold)
            lines.append(f"{preset}: {line}")
            count += worse
    return lines, count


def _changed(
    name: str, new: Mapping[str, Any], old: Mapping[str, Any], relative: bool, threshold: float
) -> tuple[str, bool]:
    if "error" in new[name] or "error" in old[name]:
        failed = "error" in new[name] and "error" not in old[name]
        text = f"REGRESSION: {new[name]['error']}" if failed else "did not run in both"
        return f"{name}: {text}", failed
    if relative:
        speeds, unit = (ratios(old)[name], ratios(new)[name]), f"x {reference_of(new)}"
    else:
        speeds, unit = (
            (old[name]["tokens_per_second_per_device"], new[name]["tokens_per_second_per_device"]),
            "tokens/s",
        )
    memory = old[name]["peak_memory_gib"], new[name]["peak_memory_gib"]
    slower, larger = speeds[1] < speeds[0] * (1 - threshold), memory[1] > memory[0] * (1 + threshold)
    mark = "REGRESSION: " if slower or larger else ""
    return (
        f"{name}: {mark}{speeds[0]:,.5g} to {speeds[1]:,.5g} {unit} ({speeds[1] / speeds[0] - 1:+.1%}), "
        f"memory {memory[0]:.1f} to {memory[1]:.1f} GiB ({memory[1] / memory[0] - 1:+.1%})",
        slower or larger,
    )
