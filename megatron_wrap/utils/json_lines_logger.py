"""`metrics.jsonl`: one JSON object a step, which any strict reader takes and a resumed run continues."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.logger_errors import refuse_unwritable


class JsonLinesLogger:
    """Appends `{"iteration": step, ...metrics}` to `output_dir/metrics.jsonl`, flushed line by line.

    JSON has no NaN and no infinity, and strict readers refuse Python's spelling of them; both are written as `null`.

    Args:
        output_dir: made if missing.
        resume_from: iteration of the checkpoint that the run goes on from. Objects of later iterations, and a line that
            a killed process left unfinished, are dropped by an atomic rewrite; what the file already has for
            `resume_from` itself (an evaluation done before the stop) is kept and not written twice. None: a new run; a
            `metrics.jsonl` of an earlier one is moved to `metrics.1.jsonl` (or the next free number).
        rank: global rank; only rank 0 touches the disk. Default: the rank that `logger` knows.

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
                    self._known = _drop_after(self.path, resume_from)
            self._file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 - open as long as the run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one object; an `iteration` within `metrics` is replaced by `step`."""
        if self._file is None:
            return
        values = {name: _plain(value) for name, value in metrics.items() if name != "iteration"}
        if step == self._resume_from and values and self._known.issuperset(values):
            return
        self._file.write(json.dumps({"iteration": step, **values}, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: Any) -> int | float | None:
    """A number that JSON can say; tensors and numpy scalars of one element count as numbers."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _drop_after(path: Path, iteration: int) -> set[str]:
    """Rewrites `path` without later objects and broken lines; returns the metric names present at `iteration`."""
    kept: list[bytes] = []
    known: set[str] = set()
    broken = 0
    content = path.read_bytes()
    for line in content.splitlines():
        try:
            entry = json.loads(line)
            written_at = entry["iteration"]
            later = written_at > iteration
        except (ValueError, KeyError, TypeError):
            broken += 1
            continue
        if later:
            continue
        if written_at == iteration:
            known.update(entry)
        kept.append(line + b"\n")
    if broken:
        logger.warning_rank_0(f"{path}: {broken} unfinished or foreign lines dropped on resume")
    if b"".join(kept) != content:
        # Written aside, then renamed: a process killed here leaves the old file or the new one, both whole.
        aside = path.with_name(path.name + ".tmp")
        with open(aside, "wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    return known
