"""Opens the files, folders, hub ids and Python sources that a source of samples names."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from typing import Any

from megatron_wrap.config.schema.data import FILE_ENDINGS, SourceConfig
from megatron_wrap.data.sources import json_files, tables
from megatron_wrap.data.sources.rows import ChosenRows, JoinedRows, JoinedStreams, ListedRows, Rows, RowStream
from megatron_wrap.errors import DataError
from megatron_wrap.nearest_names import did_you_mean
from megatron_wrap.registry import Registry


def open_rows(source: SourceConfig) -> Rows:
    """Random access to the rows of a source as they are in its files.

    Raises:
        DataError: a file is missing, empty or cannot be read. ConfigError: no such Python object.
    """
    if source.kind == "hub":
        dataset = tables.load_hub(source.path, source.subset, source.split, streaming=False)
        return tables.TableRows(dataset, f"{source.path}[{source.split or tables.DEFAULT_SPLIT}]")
    rows: Rows
    if source.kind == "python":
        rows = _python_rows(source.path)
    elif source.kind == "folder" and tables.is_saved(source.path):
        rows = tables.TableRows(tables.load_saved(source.path, _split_name(source)), source.path)
    else:
        files = [_open_file(path) for path in data_files(source)]
        rows = files[0] if len(files) == 1 else JoinedRows(files)
    if source.split is None or "[" not in source.split:
        return rows
    begin, end = tables.part_of_split(source.split, len(rows))
    return ChosenRows(rows, range(begin, end))


def stream_rows(source: SourceConfig) -> RowStream:
    """The rows of a source in order.

    Raises:
        DataError: as `open_rows`; also for a part of a split, which needs random access.
    """
    if source.split is not None and "[" in source.split:
        raise DataError(f"{source.path}: split {source.split!r} needs random access; delete streaming, or the part")
    if source.kind == "hub":
        dataset = tables.load_hub(source.path, source.subset, source.split, streaming=True)
        return tables.IterableStream(lambda: dataset, f"{source.path}[{source.split or tables.DEFAULT_SPLIT}]")
    if source.kind == "python":
        return tables.IterableStream(lambda: _iterable(source.path), source.path)
    if source.kind == "folder" and tables.is_saved(source.path):
        saved = tables.load_saved(source.path, _split_name(source))
        return tables.IterableStream(saved.to_iterable_dataset, source.path)
    return JoinedStreams([_stream_file(path) for path in data_files(source)])


def data_files(source: SourceConfig) -> list[str]:
    """The files of a source that is a file, a glob or a folder, sorted by name.

    Raises:
        DataError: there are none, or the folder has no such split.
    """
    split = _split_name(source)
    if source.kind == "glob":
        matches = glob.glob(os.path.expanduser(source.path), recursive=True)
        files = sorted(filter(os.path.isfile, matches))
        if not files:
            raise DataError(f"{source.path}: no file matches")
    elif source.kind == "folder":
        files = _files_of_folder(source.path, split)
    else:
        files = [source.path]
    if source.kind != "folder" and split not in (None, tables.DEFAULT_SPLIT):
        raise DataError(f"{source.path}: files have the split {tables.DEFAULT_SPLIT} alone, not {split}; delete split")
    return files


def _files_of_folder(folder: str, split: str | None) -> list[str]:
    splits = {
        name: data
        for name, files in tables.splits_of_folder(folder).items()
        if (data := [path for path in files if path.endswith(FILE_ENDINGS)])
    }
    if not splits:
        raise DataError(f"{folder}: contains no data files ({', '.join(FILE_ENDINGS)})")
    name = split or tables.DEFAULT_SPLIT
    if name not in splits:
        hint = did_you_mean(name, splits) or "; name one as split"
        raise DataError(f"{folder}: has the splits {', '.join(splits)}, not {name}{hint}")
    base = os.path.abspath(os.path.expanduser(folder))
    return [os.path.join(folder, os.path.relpath(path, base)) for path in splits[name]]


def _split_name(source: SourceConfig) -> str | None:
    return None if source.split is None else source.split.partition("[")[0]


def _open_file(path: str) -> Rows:
    readers: dict[str, Callable[[str], Rows]] = {".parquet": tables.open_parquet, ".arrow": tables.open_arrow}
    return readers.get(os.path.splitext(path)[1], json_files.open_json)(path)


def _stream_file(path: str) -> RowStream:
    readers: dict[str, Callable[[str], RowStream]] = {".parquet": tables.stream_parquet, ".arrow": tables.stream_arrow}
    return readers.get(os.path.splitext(path)[1], json_files.stream_json)(path)


def _python_rows(path: str) -> Rows:
    rows = _python_object(path)
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        hint = "; set streaming: true" if hasattr(rows, "__iter__") else ""
        raise DataError(
            f"{path}: must be a sequence, or a function that returns one, not a {type(rows).__name__}{hint}"
        )
    return ListedRows(rows, path)


def _iterable(path: str) -> Any:
    rows = _python_object(path)
    if not hasattr(rows, "__iter__") and not hasattr(rows, "__getitem__"):
        raise DataError(
            f"{path}: must be iterable, or a function that returns an iterable, not a {type(rows).__name__}"
        )
    return rows


def _python_object(path: str) -> Any:
    """The object at `my_module:my_dataset`, or the return value of a function."""
    registry: Registry[Any] = Registry("source of samples", "megatron_wrap.sources", {})
    target = registry.resolve(path)
    is_data = not isinstance(target, type) and (hasattr(target, "__getitem__") or hasattr(target, "__iter__"))
    return target if is_data or not callable(target) else target()
