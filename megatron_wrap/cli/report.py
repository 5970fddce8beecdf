"""`megatron-wrap report RUN...`: write one self-contained page of a run, or of several runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_wrap.checkpoint.files.run_folder import CheckpointFolder, read_manifest
from megatron_wrap.errors import ConfigError
from megatron_wrap.report.page import write_png_files
from megatron_wrap.report.run_files import RunFiles, read_run_files
from megatron_wrap.report.run_page import ReportedRun, build_page, charts_of, labels_of
from megatron_wrap.utils.atomic_write import named_write_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run, or a file of metrics in it")
    parser.add_argument(
        "--output",
        metavar="FILE.html",
        help="the page (default: report.html in the run's folder; of several runs in the working directory)",
    )
    parser.add_argument("--png", action="store_true", help="also write each chart as a PNG file beside the page")


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, and prints its path and those of the pictures."""
    runs = [read_run_files(path) for path in arguments.runs]
    folder = runs[0].folder if len(runs) == 1 else Path()
    page = Path(arguments.output or folder / "report.html")
    labels = labels_of(runs)
    if len(set(labels)) < len(labels):
        raise ConfigError(f"{', '.join(arguments.runs)}: the same run is given twice; give it once")
    reported = [ReportedRun(label, files, _checkpoints(files)) for label, files in zip(labels, runs, strict=True)]
    charts = [chart for section in charts_of(runs, labels).values() for chart in section]
    with named_write_errors(f"--output {page}", "give another file"):
        page.parent.mkdir(parents=True, exist_ok=True)
        pictures = write_png_files(charts, page.parent, page.stem) if arguments.png else []
        page.write_text(build_page(reported), encoding="utf-8")
    print(f"page: {page}")
    for path in pictures:
        print(f"picture: {path}")
    return 0


def _checkpoints(files: RunFiles) -> list[tuple[str, str, str, str]]:
    """(iteration, GiB, folder, note) of the complete checkpoints that are there now."""
    folder = files.description.get("checkpoints")
    if folder is None:
        return []
    store = CheckpointFolder(folder)
    best, latest = store.best(), store.latest()
    rows = []
    for iteration in store.iterations():
        path = store.find(iteration)
        if path is not None:
            notes = [note for note, noted in (("newest", latest), ("best", best)) if noted == iteration]
            gib = sum(read_manifest(path).get("files", {}).values()) / 2**30
            rows.append((f"{iteration:,}", f"{gib:.3g}", str(path), ", ".join(notes)))
    return rows
