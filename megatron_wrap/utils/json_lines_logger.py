"""`metrics.jsonl` and `samples.jsonl`: one strict JSON object per line; a resumed run continues the files."""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

from megatron_wrap.utils.atomic_write import atomic_file, named_write_errors
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.logger_errors import WRITABLE


class _JsonLinesFile:
    """A file of the run with one strict JSON object per line, which a resumed run continues. Only rank 0 writes.

    Args:
        output_dir: created if missing.
        resume_from: iteration of the checkpoint from which the run resumes. An atomic rewrite removes the objects of
            later iterations and an incomplete last line; existing objects of `resume_from` itself are not written
            again. None: a new run; an existing file is renamed: `metrics.jsonl` to `metrics.1.jsonl` (or the next free
            number).

    Raises:
        ConfigError: the folder or the file cannot be written.
    """

    file_name: ClassVar[str]

    def __init__(self, output_dir: str | Path, resume_from: int | None = None) -> None:
        self.path = Path(output_dir) / self.file_name
        self._resume_from = resume_from
        self._known: set[str] = set()  # keys of the objects of `resume_from` in the file
        self._file: FileIO | None = None
        if logger.rank != 0:
            return
        with named_write_errors(self.path, WRITABLE):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                if resume_from is None:
                    numbered = (self.path.with_suffix(f".{n}{self.path.suffix}") for n in itertools.count(1))
                    self.path.rename(next(path for path in numbered if not path.exists()))
                else:
                    self._known = _remove_after(self.path, resume_from)
            self._file = FileIO(self.path, "a")  # unbuffered: what a full disk refuses is not written later

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Append `{"iteration": iteration, ...values}`.

        Raises:
            OSError: the line cannot be written; nothing of it is in the file, so that later lines can follow.
        """
        if self._file is None:
            return
        line = json.dumps({"iteration": iteration, **values}, allow_nan=False, ensure_ascii=False) + "\n"
        left = memoryview(line.encode())
        size = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise


class JsonLinesLogger(_JsonLinesFile):
    """Appends `{"iteration": step, ...metrics}` to `output_dir/metrics.jsonl`.

    NaN and infinity are written as `null`, because strict JSON has neither.
    """

    file_name = "metrics.jsonl"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one object; `step` replaces an `iteration` in `metrics`."""
        values = {name: _json_number(value) for name, value in metrics.items() if name != "iteration"}
        if step == self._resume_from and values and self._known.issuperset(values):
            return
        self._write(step, values)


class SampleTexts(_JsonLinesFile):
    """Appends `{"iteration": step, "prompt": ..., "text": ...}` to `output_dir/samples.jsonl`: completions of
    `megatron_lm.train.common.sample_prompts`."""

    file_name = "samples.jsonl"

    def log(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Write one object for each (prompt, completion); those of `resume_from` are not written again."""
        if step == self._resume_from and self._known:
            return
        for prompt, text in texts:
            self._write(step, {"prompt": prompt, "text": text})


def _json_number(value: Any) -> int | float | None:
    """A JSON number, or None for NaN and infinity; accepts tensors and numpy arrays of one element."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _remove_after(path: Path, iteration: int) -> set[str]:
    """Rewrite `path` without later objects and invalid lines; returns the names of the metrics at `iteration`."""
    kept: list[bytes] = []
    known: set[str] = set()
    invalid = 0
    content = path.read_bytes()
    for line in content.splitlines():
        try:
            entry = json.loads(line)
            if entry["iteration"] > iteration:
                continue
        except (ValueError, KeyError, TypeError):
            invalid += 1
            continue
        if entry["iteration"] == iteration:
            known.update(entry)
        kept.append(line + b"\n")
    if invalid:
        logger.warning_rank_0(f"{path}: removed {invalid} incomplete or invalid lines on resume")
    if b"".join(kept) != content:
        with atomic_file(path) as file:
            file.writelines(kept)
    return known
