"""The files of a run's output folder: metrics.jsonl, samples.jsonl and run.json."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_wrap.errors import DataError
from megatron_wrap.nearest_names import missing_path_hint

METRICS, SAMPLES, RUN_JSON = "metrics.jsonl", "samples.jsonl", "run.json"
_EVALUATION = "eval/"


@dataclass(frozen=True)
class RunFiles:
    """The records of a run."""

    name: str
    """Name of the run, from its YAML; without run.json, the name of its folder."""
    folder: Path
    steps: Mapping[int, Mapping[str, float]]
    """Iteration -> metrics of the training step, ascending; without values that are not finite."""
    evaluations: Mapping[int, Mapping[str, float]]
    """Iteration -> SET/METRIC -> value."""
    samples: list[tuple[int, str, str]] = field(default_factory=list)
    """(iteration, prompt, completion) of each sample text."""
    description: Mapping[str, Any] = field(default_factory=dict)
    """Content of run.json; empty: there is none."""
    notes: tuple[str, ...] = ()
    """Remarks about the files, for the reader of the page."""

    def curve(self, name: str) -> list[tuple[float, float]]:
        """(iteration, value) of each point of a metric: of the training steps, or with the prefix `eval/` of the
        evaluations."""
        of_evaluations = name.startswith(_EVALUATION)
        source, key = (self.evaluations, name[len(_EVALUATION) :]) if of_evaluations else (self.steps, name)
        return [(iteration, values[key]) for iteration, values in source.items() if key in values]


def read_run_files(path: str) -> RunFiles:
    """Read the records of a run.

    Args:
        path: its output folder, or a file of metrics in it, such as metrics.1.jsonl of an earlier run.

    Raises:
        DataError: there is no such run, or a line is invalid, except the last line of a process that was killed.
    """
    run = Path(path).expanduser()
    file = run if run.is_file() else run / METRICS
    if run.suffix in (".yaml", ".yml"):
        raise DataError(f"{path}: is a configuration, not a run; give its output folder, such as outputs/{run.stem}")
    if not file.is_file():
        missing = f"no {METRICS} in it" if run.is_dir() else f"no such run{missing_path_hint(run)}"
        raise DataError(f"{path}: {missing}; give the folder of megatron_wrap.logger.output_dir of a run")
    folder, notes = file.parent, list[str]()
    steps: dict[int, dict[str, float]] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for entry in _objects(file, (int, float, type(None)), notes):
        for name, value in entry.items():
            if name == "iteration" or value is None:  # null: not a number, or infinite
                continue
            is_evaluation = name.startswith(_EVALUATION)
            by_iteration = evaluations if is_evaluation else steps
            by_iteration.setdefault(entry["iteration"], {})[name.removeprefix(_EVALUATION)] = value
    if not steps and not evaluations:
        raise DataError(f"{file}: it has no steps and no evaluations yet; wait for the run's first step")
    # only the metrics remain of an earlier run in the same folder
    is_last = file.name == METRICS
    samples = _objects(folder / SAMPLES, (int, str), notes) if is_last and (folder / SAMPLES).is_file() else []
    description = _read_description(folder / RUN_JSON) if is_last and (folder / RUN_JSON).is_file() else {}
    return RunFiles(
        name=str(description.get("name", folder.resolve().name if is_last else file)),
        folder=folder,
        steps=dict(sorted(steps.items())),
        evaluations=dict(sorted(evaluations.items())),
        samples=[(entry["iteration"], str(entry.get("prompt")), str(entry.get("text"))) for entry in samples],
        description=description,
        notes=tuple(notes),
    )


def _objects(file: Path, kinds: tuple[type, ...], notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, and a note if its last line is incomplete.

    Args:
        kinds: allowed types of values.
        notes: receives the note.
    """
    entries: list[dict[str, Any]] = []
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; change its permissions") from error
    lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_checked(json.loads(line), kinds))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not content.endswith(b"\n"):
                notes.append(f"{file}:{number}: the last line is incomplete and left out; the run was killed")
                break
            shown = line[:60].decode("utf-8", "replace")
            message = f"{file}:{number}: not a line of a run's records ({error}): {shown!r}; delete the line"
            raise DataError(message) from error
    return entries


def _checked(entry: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    if not isinstance(entry, dict) or type(entry.get("iteration")) is not int:
        raise TypeError("an object with an integer iteration is expected")
    for name, value in entry.items():
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{name} is of type {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise TypeError(f"{name} is {value}")
    return entry


def _read_description(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        description = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(description, dict):
            return description
    raise DataError(f"{file}: cannot be read as the description of a run; delete it, and the page has no configuration")
