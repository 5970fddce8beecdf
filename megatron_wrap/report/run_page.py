"""The page of `megatron-wrap report`: curves, evaluations, sample texts, configuration, checkpoints, environment."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_wrap.metrics.number_format import counted, four_decimals, with_prefix
from megatron_wrap.report.curves import curves
from megatron_wrap.report.page import Cell, Item, Page
from megatron_wrap.report.run_charts import charts_of
from megatron_wrap.report.run_files import RunFiles

_MOST_ROWS = 40
"""Maximum number of evaluations in a table."""
_MOST_TEXTS = 300
_SET_BY_RUN = ("(override)", "(hf_path)", "command line")
"""Endings of the origins of values that are not from the configuration tree."""
Row = list[str | Cell]


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint of a run."""

    iteration: int
    gib: float
    """Size of its files."""
    folder: str
    note: str = ""


@dataclass(frozen=True)
class ReportedRun:
    """A run on the page."""

    label: str
    """Unique among the runs."""
    files: RunFiles
    checkpoints: Sequence[CheckpointFacts] = ()


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """A label for each run: its name, with its folder if several runs have that name."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({run.folder})" for name, run in zip(names, runs, strict=True)]


def build_page(runs: Sequence[ReportedRun]) -> str:
    """The HTML of the page."""
    files, labels = [run.files for run in runs], [run.label for run in runs]
    title = f"Run {labels[0]}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(labels)}"
    page = Page(title, "; ".join(dict.fromkeys(_subtitle(run) for run in files)))
    if len(runs) == 1:
        page.tiles([*_summary(files[0]).items()])
    else:
        summaries = [_summary(run) for run in files]
        head = [*{name: None for summary in summaries for name in summary}]
        page.table(
            ("run", *head),
            [
                [label, *(Cell(summary.get(name, ""), "number") for name in head)]
                for label, summary in zip(labels, summaries, strict=True)
            ],
        )
    for run in runs:
        for note in run.files.notes:
            page.paragraph(note)
    for name, charts in charts_of(files, labels).items():
        is_evaluations = name == "Evaluations"
        if charts or (is_evaluations and any(run.evaluations for run in files)):
            page.heading(name)
        if charts:
            page.figures([curves(chart) for chart in charts])
        if is_evaluations:
            _add_evaluations(page, runs)
    _add_texts(page, runs)
    _add_configuration(page, runs)
    _add_checkpoints(page, runs)
    _add_environment(page, runs)
    return page.html()


def _subtitle(run: RunFiles) -> str:
    facts = run.facts
    layout = facts.get("layout", {})
    sizes = [f"{name.upper()} {size}" for name, size in layout.items() if isinstance(size, int) and size > 1]
    parts = [str(facts["flow"])] if "flow" in facts else []
    if "processes" in facts:
        parts.append(counted(facts["processes"], "process"))
    parts += [", ".join(sizes)] if sizes else []
    parts += [f"started {facts['started']}"] if "started" in facts else []
    if facts.get("resumed_from") is not None:
        parts.append(f"resumed from iteration {facts['resumed_from']}")
    return ", ".join(parts) or str(run.folder)


def _summary(run: RunFiles) -> Mapping[str, str]:
    """Name -> number of a run, for the numbers that it has."""
    total, last = run.facts.get("train_iters"), max([*run.steps, *run.evaluations])
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


def _add_evaluations(page: Page, runs: Sequence[ReportedRun]) -> None:
    for run in runs:
        evaluations = run.files.evaluations
        if not evaluations:
            continue
        names = [*{name: None for values in evaluations.values() for name in values}]
        step = -(-len(evaluations) // _MOST_ROWS)
        shown = [*evaluations.items()][::-1][::step]  # contains the last one
        note = f", one of {step}" if step > 1 else ""
        page.folded(
            f"Evaluations of {run.label}: {len(evaluations):,}{note}, the last one first",
            ("iteration", *names),
            [
                [Cell(f"{iteration:,}", "number"), *(_number(values.get(name)) for name in names)]
                for iteration, values in shown
            ],
        )


def _number(value: float | None) -> Cell:
    return Cell("" if value is None else four_decimals(value), "number")


def _add_texts(page: Page, runs: Sequence[ReportedRun]) -> None:
    items, choices = [], []
    for index, run in enumerate(runs):
        texts = run.files.samples[::-1][:_MOST_TEXTS]
        choices += [(f"run{index}", f"{run.label}: {len(texts):,}")] if texts else []
        items += [
            Item(f"iteration {iteration:,}", [run.label], [[(prompt, "other"), (text, "trained")]], [f"run{index}"])
            for iteration, prompt, text in texts
        ]
    if items:
        page.heading("Sample texts")
        page.paragraph("Highlighted: written by the model. The newest first; the arrow keys turn pages.")
        page.items(items, [("", f"all {len(items):,}"), *(choices if len(choices) > 1 else [])])


def _add_configuration(page: Page, runs: Sequence[ReportedRun]) -> None:
    known = [run for run in runs if run.files.facts.get("configuration")]
    if not known:
        return
    page.heading("Configuration")
    values = [{path: value for path, value, _ in run.files.facts["configuration"]} for run in known]
    if len(known) > 1:
        paths = {path: None for of_run in values for path in of_run}
        different = [path for path in paths if len({of_run.get(path, "") for of_run in values}) > 1]
        page.paragraph("Where the runs differ:" if different else "The runs have the same configuration.")
        rows: list[Row] = [[path, *(of_run.get(path, "") for of_run in values)] for path in different]
        if rows:
            page.table(("key", *(run.label for run in known)), rows)
    for run in known:
        entries = run.files.facts["configuration"]
        everything: list[Row] = [[path, value, Cell(origin, "soft")] for path, value, origin in entries]
        set_by_run = [row for row, (_, _, origin) in zip(everything, entries, strict=True) if _is_set(origin)]
        head = ("key", "value", "set at")
        if len(known) == 1:
            page.table(head, set_by_run)
        else:
            page.folded(f"Set by {run.label}: {counted(len(set_by_run), 'key')}", head, set_by_run)
        page.folded(f"All {len(entries):,} values of {run.label}", head, everything)


def _is_set(origin: str) -> bool:
    return origin.endswith(_SET_BY_RUN) or origin.startswith("chosen: ")


def _add_checkpoints(page: Page, runs: Sequence[ReportedRun]) -> None:
    for run in runs:
        folder = run.files.facts.get("checkpoints")
        if folder is None:
            continue
        page.heading("Checkpoints" if len(runs) == 1 else f"Checkpoints of {run.label}")
        if not run.checkpoints:
            page.paragraph(f"None in {folder}.")
            continue
        rows: list[Row] = [
            [Cell(f"{saved.iteration:,}", "number"), Cell(f"{saved.gib:.3g}", "number"), saved.folder, saved.note]
            for saved in run.checkpoints
        ]
        page.table(("iteration", "GiB", "folder", ""), rows)


def _add_environment(page: Page, runs: Sequence[ReportedRun]) -> None:
    known = [run for run in runs if run.files.facts.get("environment")]
    if not known:
        return
    page.heading("Environment")
    environments = [run.files.facts["environment"] for run in known]
    names = [*{name: None for environment in environments for name in environment}]
    head = ("", "") if len(known) == 1 else ("", *(run.label for run in known))
    page.table(head, [[Cell(name, "soft"), *(str(values.get(name, "")) for values in environments)] for name in names])
