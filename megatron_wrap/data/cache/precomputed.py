"""Outputs of a reference model on disk: safetensors, keyed by the hash of the sample that they belong to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.inside_folder import leaves_folder
from megatron_wrap.utils.atomic_write import named_write_errors, write_atomically

MANIFEST = "precomputed.json"
"""File with metadata of the outputs and the number of samples of each file; written last."""
_HASHES, _ENDS = "hashes", ".ends"
_FORMAT = 1
_ADVICE = "give another folder, or free space in this one"
_SAMPLES_OF_A_FILE = 65_536


def sample_hash(sample: Any) -> bytes:
    """SHA-256 of a sample's canonical JSON, 32 bytes: sorted keys, no white space, arrays and tensors as lists, without
    `source`, which is only a name.

    Raises:
        DataError: the sample is no mapping, or contains something that JSON cannot express.
    """
    if not isinstance(sample, Mapping):
        raise DataError(
            f"a sample is of type {type(sample).__name__}; precomputed outputs need samples that are mappings"
        )
    content = {name: value for name, value in sample.items() if name != "source"}
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)
    except TypeError as error:
        raise DataError(f"a sample cannot be written as JSON, so it has no hash: {error}") from error
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class PrecomputedWriter:
    """Writes the outputs of samples into a folder; `close` makes them complete.

    Args:
        folder: has no precomputed outputs yet.
        metadata: JSON values that a reader compares, such as the flow.

    Raises:
        ConfigError: the folder contains outputs already, or cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], metadata: Mapping[str, Any]) -> None:
        self._folder, self._metadata = Path(folder).expanduser(), dict(metadata)
        if (self._folder / MANIFEST).exists():
            raise ConfigError(
                f"{self._folder} contains precomputed outputs already; choose another folder, or delete it"
            )
        with named_write_errors(self._folder, _ADVICE):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._rows: list[tuple[bytes, dict[str, np.ndarray]]] = []
        self._files: dict[str, int] = {}

    def add(self, key: bytes, outputs: Mapping[str, np.ndarray]) -> None:
        """Add the outputs of one sample: name -> scalar, or array whose first dimension may differ between samples."""
        self._rows.append((key, dict(outputs)))
        if len(self._rows) == _SAMPLES_OF_A_FILE:
            self._write()

    def close(self) -> int:
        """Write the remaining outputs, then the manifest; returns the number of samples."""
        self._write()
        manifest = {**self._metadata, "format": _FORMAT, "files": self._files}
        with named_write_errors(self._folder, _ADVICE):
            write_atomically(self._folder / MANIFEST, json.dumps(manifest, indent=1))
        return sum(self._files.values())

    def _write(self) -> None:
        if not self._rows:
            return
        from safetensors.numpy import save_file

        hashes = np.frombuffer(b"".join(key for key, _ in self._rows), dtype=np.uint8).reshape(-1, 32)
        tensors = {_HASHES: hashes}
        for name in self._rows[0][1]:
            values = [outputs[name] for _, outputs in self._rows]
            if values[0].ndim == 0:
                tensors[name] = np.stack(values)
            else:
                tensors[name] = np.concatenate(values)
                tensors[name + _ENDS] = np.cumsum([len(value) for value in values])
        name = f"outputs-{len(self._files):05d}.safetensors"
        with named_write_errors(self._folder / name, _ADVICE):
            save_file(tensors, self._folder / name)
        self._files[name] = len(self._rows)
        self._rows = []


class PrecomputedOutputs:
    """The outputs in a folder, by the hash of a sample. Each process opens the files when it first needs them, and maps
    them into memory.

    Args:
        folder: from `PrecomputedWriter`.

    Raises:
        DataError: the folder has no complete outputs.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        try:
            self.metadata: dict[str, Any] = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            self._names = list(dict(self.metadata["files"]))
            known = self.metadata["format"] == _FORMAT
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.folder} has no precomputed outputs ({error}); run megatron-wrap precompute, which writes them"
            ) from error
        problem = next(filter(None, (leaves_folder(self.folder, name) for name in self._names)), None)
        if problem is not None:
            raise DataError(f"{self.folder / MANIFEST} {problem}; precompute the outputs again")
        if not known:
            raise DataError(
                f"{self.folder} has format {self.metadata['format']}, not {_FORMAT}; precompute the outputs again"
            )
        self._files: dict[int, dict[str, Any]] = {}
        self._process = os.getpid()
        tables = [self._table(number) for number in range(len(self._names))]
        self._ends = np.cumsum([len(table) for table in tables])
        hashes = np.concatenate(tables) if tables else np.zeros((0, 32), np.uint8)
        self._hashes = hashes.view("S32")[:, 0]
        self._order = np.argsort(self._hashes)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._hashes)

    def get(self, key: bytes) -> dict[str, Any] | None:
        """Name -> float of a scalar, or array, of the sample with this hash; None if there is none.

        Raises:
            DataError: a file cannot be read.
        """
        index = int(np.searchsorted(self._hashes, np.bytes_(key), sorter=self._order))
        if index == len(self) or self._hashes[self._order[index]] != np.bytes_(key):
            return None
        return self._row(int(self._order[index]))

    def _row(self, row: int) -> dict[str, Any]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        index = row - (int(self._ends[number - 1]) if number else 0)
        values = self._file(number)
        outputs: dict[str, Any] = {}
        for name, column in values.items():
            if name == _HASHES or name.removesuffix(_ENDS) != name:
                continue
            if name + _ENDS not in values:
                outputs[name] = column[index : index + 1][0].item()
                continue
            ends = values[name + _ENDS][max(0, index - 1) : index + 1]
            begin, end = int(ends[0]) if index else 0, int(ends[-1])
            outputs[name] = column[begin:end] if begin < end else column[:][:0]  # safetensors has no empty slice
        return outputs

    def _table(self, number: int) -> np.ndarray:
        """Hashes of a file's samples, uint8 [samples, 32]."""
        column = self._file(number).get(_HASHES)
        table = None if column is None else column[:]
        if table is None or table.dtype != np.uint8 or table.ndim != 2 or table.shape[1] != 32:
            raise DataError(f"{self.folder / self._names[number]} has no hashes; precompute the outputs again")
        wrong = next((name for name in self._file(number) if not self._has_rows(number, name, len(table))), None)
        if wrong is not None:
            raise DataError(
                f"{self.folder / self._names[number]}: {wrong} is not of the {len(table)} samples of the file; "
                "precompute the outputs again"
            )
        return table

    def _has_rows(self, number: int, name: str, samples: int) -> bool:
        """Whether a tensor of a file has the rows of its samples, or the ends of their rows."""
        values = self._file(number)
        if name + _ENDS in values:
            return True  # compared with its ends
        rows = values[name].get_shape()[:1]
        if rows != [samples] or not name.endswith(_ENDS):
            return bool(rows == [samples])
        ends = values[name][:]
        total = values[name.removesuffix(_ENDS)].get_shape()[:1] if name.removesuffix(_ENDS) in values else None
        return bool((np.diff(ends, prepend=0) >= 0).all()) and ends[-1:].tolist() == total

    def _file(self, number: int) -> dict[str, Any]:
        """Name -> tensor of a file; a tensor's data is read when it is indexed."""
        if self._process != os.getpid():  # an open file belongs to the process that opened it
            self._files, self._process = {}, os.getpid()
        if number not in self._files:
            from safetensors import SafetensorError, safe_open

            path = self.folder / self._names[number]
            try:
                file = safe_open(path, framework="np")
                self._files[number] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            except (OSError, SafetensorError) as error:
                raise DataError(f"{path} cannot be read ({error}); precompute the outputs again") from error
        return self._files[number]


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot express to one that it can: arrays and tensors to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset | range):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise TypeError(f"a value of type {type(value).__name__}")
