"""`metrics.jsonl`: one strict JSON object per step; a resumed run continues the file."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.logger_errors import refuse_unwritable


class JsonLinesLogger:
    """Appends `{"iteration": step, ...metrics}` to `output_dir/metrics.jsonl` and flushes each line.

    NaN and infinity are written as `null`, because strict JSON has neither.

    Args:
        output_dir: created if missing.
        resume_from: iteration of the checkpoint from which the run resumes. An atomic rewrite removes the objects of
            later iterations and an incomplete last line; existing metrics of `resume_from` itself (an evaluation before
            the stop) are kept and not written twice. None: a new run; an existing `metrics.jsonl` is renamed to
            `metrics.1.jsonl` (or the next free number).
        rank: global rank; only rank 0 writes. Default: `logger.rank`.

    Raises:
        ConfigError: the folder or the file cannot be written.
    """

    file_name = "metrics.jsonl"

    def __init__(self, output_dir: str | Path, resume_from: int | None = None, rank: int | None = None) -> None:
        self.path = Path(output_dir) / self.file_name
        self._resume_from = resume_from
        self._known: set[str] = set()
        self._file: IO[str] | None = None
        if (logger.rank if rank is None else rank) != 0:
            return
        with refuse_unwritable("metrics", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                if resume_from is None:
                    self.path.rename(_free_name(self.path))
                else:
                    self._known = _remove_after(self.path, resume_from)
            self._file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 - closed by `close`

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one object; `step` replaces an `iteration` in `metrics`."""
        if self._file is None:
            return
        values = {name: _json_number(value) for name, value in metrics.items() if name != "iteration"}
        if step == self._resume_from and values and self._known.issuperset(values):
            return
        self._file.write(json.dumps({"iteration": step, **values}, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _json_number(value: Any) -> int | float | None:
    """A JSON number, or None for NaN and infinity; accepts tensors and numpy arrays of one element."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _remove_after(path: Path, iteration: int) -> set[str]:
    """Rewrite `path` without later objects and invalid lines; returns the metric names present at `iteration`."""
    kept: list[bytes] = []
    known: set[str] = set()
    invalid = 0
    content = path.read_bytes()
    for line in content.splitlines():
        try:
            entry = json.loads(line)
            written_at = entry["iteration"]
            later = written_at > iteration
        except (ValueError, KeyError, TypeError):
            invalid += 1
            continue
        if later:
            continue
        if written_at == iteration:
            known.update(entry)
        kept.append(line + b"\n")
    if invalid:
        logger.warning_rank_0(f"{path}: removed {invalid} incomplete or invalid lines on resume")
    if b"".join(kept) != content:
        # Write a temporary file and rename it: a process killed here leaves the complete old or new file.
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return known
