"""Selects the curves of runs to draw: a chart for each metric that changes, by section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_wrap.metrics.declared import ENGINE_METRICS, console_order, metric_info
from megatron_wrap.report.curves import Chart, Series
from megatron_wrap.report.run_files import RunFiles

_SPEED = ("tokens_per_second", "tflops", "elapsed_time", "memory_max")
_ALWAYS = ("loss", "grad_norm", "learning_rate", "global_batch_size", *_SPEED)
_NEVER = (
    *("throughput", "num_tokens", "tokens_per_second_per_device", "memory_allocated", "memory_reserved"),
    *("consumed_samples", "consumed_tokens"),
)
"""Names of metrics without a chart, because they repeat others or grow with the iteration."""


def charts_of(runs: Sequence[RunFiles], labels: Sequence[str]) -> Mapping[str, list[Chart]]:
    """Section -> its charts; a metric that never changes has none, except those that readers expect.

    Args:
        labels: a name for each run, all different.
    """
    sections: dict[str, list[Chart]] = {"Training": [], "Evaluations": [], "Speed and memory": []}
    if len(runs) == 1:
        sections["Training"] += _losses(runs[0])
    for name in console_order({name: None for run in runs for values in run.steps.values() for name in values}):
        chart = _chart(runs, labels, name, name)
        if name in _NEVER or (name == "loss" and len(runs) == 1) or chart is None:
            continue
        if name in _ALWAYS or _changes(chart):
            sections["Speed and memory" if name in _SPEED else "Training"].append(chart)
    for name in {name: None for run in runs for values in run.evaluations.values() for name in values}:
        chart = _chart(runs, labels, f"eval/{name}", name)
        if chart is not None and _changes(chart) and not (len(runs) == 1 and name.endswith("/loss")):
            sections["Evaluations"].append(chart)
    return sections


def _changes(chart: Chart) -> bool:
    return len({value for series in chart.series for _, value in series.points}) > 1


def _losses(run: RunFiles) -> list[Chart]:
    """The loss of training and of the evaluation sets."""
    names = {name: None for values in run.evaluations.values() for name in values if name.endswith("/loss")}
    series = [Series("training", run.curve("loss"))] if run.curve("loss") else []
    for color, name in enumerate(names, start=1):
        series.append(Series(name.removesuffix("/loss"), run.curve(f"eval/{name}"), color, is_evaluation=True))
    return [Chart("loss", series)] if series else []


def _chart(runs: Sequence[RunFiles], labels: Sequence[str], name: str, title: str) -> Chart | None:
    series = [
        Series(label, run.curve(name), color, name.startswith("eval/"))
        for color, (run, label) in enumerate(zip(runs, labels, strict=True))
        if run.curve(name)
    ]
    unit = metric_info(name).unit if name in ENGINE_METRICS else ""
    return Chart(title, series, unit) if series else None
