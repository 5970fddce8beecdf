"""The page of `megatron-wrap report`: curves, evaluations, sample texts, configuration, checkpoints, environment."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wrap.metrics.declared import ENGINE_METRICS, console_order, metric_info
from megatron_wrap.metrics.number_format import counted, four_decimals, with_prefix
from megatron_wrap.report.page import TEMPLATES, Chart, Item, Series, figure, rendered
from megatron_wrap.report.run_files import RunFiles

_MOST_ROWS = 40
"""Maximum number of evaluations in a table."""
_MOST_TEXTS = 300
_SET_BY_RUN = ("(override)", "(hf_path)", "command line")
"""Endings of the origins of values that are not from the configuration tree."""


@dataclass(frozen=True)
class ReportedRun:
    """A run on the page."""

    label: str
    """Label of the run, unique on the page."""
    files: RunFiles
    checkpoints: Sequence[tuple[str, str, str, str]] = ()
    """(iteration, GiB, folder, note) of each checkpoint."""


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """A label for each run: its name, with its folder if several runs have that name."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({run.folder})" for name, run in zip(names, runs, strict=True)]


def build_page(runs: Sequence[ReportedRun]) -> str:
    """The HTML of the page."""
    files, labels = [run.files for run in runs], [run.label for run in runs]
    summaries = [_summary(run) for run in files]
    names = _keys(summaries)
    environments = {
        run.label: run.files.description["environment"] for run in runs if run.files.description.get("environment")
    }
    return rendered(
        TEMPLATES / "run.html",
        title=f"Run {labels[0]}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(labels)}",
        subtitle="; ".join(dict.fromkeys(_subtitle(run) for run in files)),
        runs=runs,
        summaries=summaries,
        summary_names=names,
        summary_rows=[
            [label, *(summary.get(name, "") for name in names)]
            for label, summary in zip(labels, summaries, strict=True)
        ],
        sections={name: [*map(figure, charts)] for name, charts in charts_of(files, labels).items()},
        evaluations=[_evaluations(run) for run in runs if run.files.evaluations],
        environments=[*environments] if len(environments) > 1 else [""] * len(environments),
        environment_rows=_rows_by_key(environments.values()),
        **_texts(runs),
        **_configurations(runs),
    )


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of all mappings, each once."""
    return [*{key: None for mapping in mappings for key in mapping}]


def _rows_by_key(mappings: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each key: the key, and its value in each mapping."""
    columns = [*mappings]
    return [[key, *(str(column.get(key, "")) for column in columns)] for key in _keys(columns)]


def _subtitle(run: RunFiles) -> str:
    description = run.description
    layout = description.get("layout", {})
    sizes = [f"{name.upper()} {size}" for name, size in layout.items() if isinstance(size, int) and size > 1]
    parts = [str(description["flow"])] if "flow" in description else []
    if "processes" in description:
        parts.append(counted(description["processes"], "process"))
    parts += [", ".join(sizes)] if sizes else []
    parts += [f"started {description['started']}"] if "started" in description else []
    if description.get("resumed_from") is not None:
        parts.append(f"resumed from iteration {description['resumed_from']}")
    return ", ".join(parts) or str(run.folder)


def _summary(run: RunFiles) -> Mapping[str, str]:
    """Name -> number of a run, for the numbers that the run has."""
    total, last = run.description.get("train_iters"), max([*run.steps, *run.evaluations])
    numbers = {"steps": f"{last:,}" if total is None else f"{last:,} of {total:,}"}
    losses = _values(run, "loss")[-10:]
    if losses:
        name = f"loss, mean of the last {len(losses)} steps" if len(losses) > 1 else "loss"
        numbers[name] = f"{statistics.fmean(losses):.4f}"
    for name in {name: None for values in run.evaluations.values() for name in values if name.endswith("/loss")}:
        iteration, value = min(run.curve(f"eval/{name}"), key=lambda point: point[1])
        numbers[f"best loss on {name.removesuffix('/loss')}"] = f"{value:.4f} at {iteration:,}"
    if tokens := _values(run, "consumed_tokens"):
        numbers["tokens"] = with_prefix(tokens[-1])
    if speeds := _values(run, "tokens_per_second"):
        numbers["tokens/s, median"] = with_prefix(statistics.median(speeds))
    tflops = _values(run, "tflops")
    if tflops and statistics.median(tflops) >= 0.1:
        numbers["TFLOP/s per device, median"] = f"{statistics.median(tflops):.3g}"
    if seconds := _values(run, "elapsed_time"):
        numbers["time of all steps"] = str(datetime.timedelta(seconds=round(sum(seconds))))
    memory = max(_values(run, "memory_max"), default=0)
    if memory > 0:
        numbers["GiB at most"] = f"{memory:.3g}"
    return numbers


def _values(run: RunFiles, name: str) -> list[float]:
    return [value for _, value in run.curve(name)]


def _evaluations(run: ReportedRun) -> tuple[str, list[str], list[list[str]]]:
    """Title, names and rows of the table of a run's evaluations."""
    evaluations = run.files.evaluations
    names = _keys(evaluations.values())
    step = -(-len(evaluations) // _MOST_ROWS)
    shown = [*evaluations.items()][::-1][::step]  # contains the last one
    note = f", one of {step}" if step > 1 else ""
    rows = [
        [f"{iteration:,}", *(four_decimals(values[name]) if name in values else "" for name in names)]
        for iteration, values in shown
    ]
    return f"Evaluations of {run.label}: {len(evaluations):,}{note}, the last one first", names, rows


def _texts(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """The sample texts, and the choices among runs."""
    items, choices = [], []
    for index, run in enumerate(runs):
        texts = run.files.samples[::-1][:_MOST_TEXTS]
        choices += [(f"run{index}", f"{run.label}: {len(texts):,}")] if texts else []
        items += [
            Item(f"iteration {iteration:,}", [run.label], [[(prompt, "other"), (text, "trained")]], [f"run{index}"])
            for iteration, prompt, text in texts
        ]
    return {"texts": items, "choices": [("", f"all {len(items):,}"), *(choices if len(choices) > 1 else [])]}


def _configurations(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """(label, all values, values that the run sets) of each run, and the values in which the runs differ."""
    known = {
        run.label: run.files.description["configuration"] for run in runs if run.files.description.get("configuration")
    }
    rows = _rows_by_key([{path: value for path, value, _ in entries} for entries in known.values()])
    return {
        "configurations": [
            (label, entries, [entry for entry in entries if _is_set(entry[2])]) for label, entries in known.items()
        ],
        "differences": [row for row in rows if len({*row[1:]}) > 1],
    }


def _is_set(origin: str) -> bool:
    return origin.endswith(_SET_BY_RUN) or origin.startswith("chosen: ")


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
