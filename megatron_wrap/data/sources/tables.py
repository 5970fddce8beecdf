"""Tables: parquet and Arrow files, folders of save_to_disk, and the hub.

Rows are read with the `datasets` library, except streams of parquet and Arrow files: those of `datasets` are ten times
slower, read every row before the one that a resumed run needs, and report damage without its row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_wrap.data.sources.rows import Rows
from megatron_wrap.errors import DataError, special_file
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.nearest_names import did_you_mean, missing_path_hint

if TYPE_CHECKING:
    import pyarrow.parquet


DEFAULT_SPLIT = "train"
_BATCH_ROWS = 1024
_BATCH_BYTES = 1 << 28
"""Average size in bytes of the rows of a parquet file that are decoded at once."""


class TableRows:
    """Random access to a `datasets.Dataset`, memory-mapped; cells without a value are left out of a row.

    Arrow has every column in every row and every field in every structure, with null where a sample had none. A chat
    template would render these nulls, such as the arguments of another tool.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return without_nulls(self._dataset[index])
        except Exception as error:  # Arrow and the decoders of datasets raise different types
            raise DataError(f"{self.where(index)}: cannot be read ({_reason(error)}); write the file again") from error

    def where(self, index: int) -> str:
        """See `Rows`."""
        return f"{self._name}:{index + 1}"


class TableStream:
    """A table in order, in record batches; see `RowStream`.

    Args:
        name: the file, for messages.
        batches: opens the table for reading from a row on; it yields the index of the first row of each record batch,
            and the batch. Earlier batches may be empty.
    """

    def __init__(self, name: str, batches: Callable[[int], Iterator[tuple[int, Any]]]) -> None:
        self._name, self._batches = name, batches
        self.length: int | None = None

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        """See `RowStream`."""
        end = 0
        try:
            for begin, batch in self._batches(index):
                end = begin + batch.num_rows
                first = max(0, index - begin)
                for number, row in enumerate(batch.slice(first).to_pylist(), begin + first + 1):
                    yield f"{self._name}:{number}", without_nulls(row)
        except (OSError, ValueError, NotImplementedError) as error:  # Arrow's errors are subclasses of these
            raise DataError(
                f"{self._name}:{end + 1}: cannot be read ({_reason(error)}); write the file again"
            ) from error
        self.length = end


class IterableStream:
    """A `datasets.IterableDataset`, or anything that can be iterated several times; see `RowStream`.

    Args:
        open_rows: returns the iterable, from its first row on.
        name: for messages.
    """

    def __init__(self, open_rows: Callable[[], Any], name: str) -> None:
        self._open, self._name = open_rows, name
        self.length: int | None = None

    def start_at(self, index: int) -> Iterator[tuple[str, Any]]:
        """See `RowStream`."""
        rows, count = self._open(), 0
        if hasattr(rows, "skip") and (self.length is None or index < self.length):
            rows, count = rows.skip(index), index
        skipped = count
        iterator = iter(rows)
        while True:
            try:
                row = next(iterator)
            except StopIteration:
                break
            except Exception as error:  # the network, the hub and the code of a dataset raise different types
                raise DataError(f"{self._name}:{count + 1}: cannot be read ({_reason(error)})") from error
            count += 1
            if count > index:
                yield f"{self._name}:{count}", without_nulls(row) if isinstance(row, Mapping) else row
        if count == skipped > 0:  # the end is before `index`: count the rows
            count = sum(1 for _ in self._open())
        self.length = count


def without_nulls(value: Any) -> Any:
    """A copy without the keys of mappings whose value is None, at every depth below lists and mappings."""
    if isinstance(value, Mapping):
        return {key: without_nulls(below) for key, below in value.items() if below is not None}
    if isinstance(value, list) and value and isinstance(value[0], (Mapping, list)):
        return [without_nulls(below) for below in value]
    return value


def open_parquet(path: str) -> Rows:
    """Random access to a parquet file, converted once to Arrow in the cache folder of `datasets`.

    Raises:
        DataError: the file is missing, truncated or no parquet, or its content is far larger than the file.
    """
    import datasets

    def converted(file: str) -> Any:
        check_decoded_size(file, path)
        return datasets.Dataset.from_parquet(file)

    return TableRows(_read(path, "parquet", converted), path)


def open_arrow(path: str) -> Rows:
    """Random access to an Arrow file of either form, memory-mapped.

    Raises:
        DataError: the file is missing, truncated or no Arrow.
    """
    import datasets

    def mapped(file: str) -> Any:
        if _is_arrow_file(file):
            import pyarrow

            return datasets.Dataset(pyarrow.ipc.open_file(pyarrow.memory_map(file)).read_all())
        return datasets.Dataset.from_file(file)

    return TableRows(_read(path, "Arrow", mapped), path)


def stream_parquet(path: str, columns: Sequence[str] | None = None) -> TableStream:
    """A parquet file in order; row groups before the first requested row are not read.

    Args:
        columns: to read; None: all.

    Raises:
        DataError: while rows are read, if the file is missing, damaged, or has no such column.
    """

    def batches(index: int) -> Iterator[tuple[int, Any]]:
        import pyarrow.parquet

        existing = _existing(path)
        check_decoded_size(existing, path)
        file = pyarrow.parquet.ParquetFile(existing)
        present = file.schema_arrow.names
        for column in columns or ():
            if column not in present:
                hint = did_you_mean(column, present)
                raise DataError(f"{path}: has no column {column!r}, but {', '.join(map(repr, present))}{hint}")
        begin = 0
        for group in range(file.num_row_groups):
            rows, num_bytes = file.metadata.row_group(group).num_rows, file.metadata.row_group(group).total_byte_size
            if begin + rows <= index:
                begin += rows
                yield begin, file.schema_arrow.empty_table()
                continue
            batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, num_bytes)))
            for batch in file.iter_batches(batch_size=batch_rows, row_groups=[group], columns=columns):
                yield begin, batch
                begin += batch.num_rows

    return TableStream(path, batches)


def stream_arrow(path: str) -> TableStream:
    """An Arrow file of either form in order."""

    def batches(index: int) -> Iterator[tuple[int, Any]]:
        import pyarrow

        file, begin = _existing(path), 0
        mapped = pyarrow.memory_map(file)
        if _is_arrow_file(file):
            reader = pyarrow.ipc.open_file(mapped)
            record_batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            record_batches = iter(pyarrow.ipc.open_stream(mapped))
        for batch in record_batches:
            yield begin, batch
            begin += batch.num_rows

    return TableStream(path, batches)


def load_saved(path: str, split: str | None) -> Any:
    """The dataset of a save_to_disk folder, or its named split.

    Raises:
        DataError: the folder cannot be read, or has no such split.
    """
    import datasets

    dataset = _read(path, "dataset of save_to_disk", lambda folder: datasets.load_from_disk(folder))
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    name = split or DEFAULT_SPLIT
    if name not in dataset:
        raise DataError(f"{path}: has the splits {', '.join(dataset)}, not {name}{did_you_mean(name, dataset)}")
    return dataset[name]


def is_saved(folder: str) -> bool:
    """Whether a folder was written by save_to_disk."""
    names = ("state.json", "dataset_dict.json")
    return any(os.path.isfile(os.path.join(os.path.expanduser(folder), name)) for name in names)


def load_hub(path: str, subset: str | None, split: str | None, streaming: bool) -> Any:
    """A dataset of the Hugging Face hub, or of its local cache where there is no network.

    Raises:
        DataError: it cannot be loaded, or has no such subset or split.
    """
    import datasets

    try:
        return datasets.load_dataset(path, subset, split=split or DEFAULT_SPLIT, streaming=streaming)
    except Exception as error:  # the hub, the network and the builders raise different types
        hint = missing_path_hint(path)
        raise DataError(
            f"{path}: no such file or folder{hint}; the Hugging Face hub did not provide it either ({_reason(error)})"
        ) from error


def splits_of_folder(folder: str) -> dict[str, list[str]]:
    """Name of each split -> the data files of a folder, by the rules of `datasets` for file and folder names."""
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    base = os.path.abspath(os.path.expanduser(folder))
    try:
        files_of_splits = DataFilesDict.from_patterns(get_data_patterns(base), base)
    except EmptyDatasetError:
        return {}
    return {str(split): sorted(files) for split, files in files_of_splits.items()}


def part_of_split(split: str, rows: int) -> tuple[int, int]:
    """Begin and end of a split such as `train[:10%]`, by the rules of `datasets`.

    Raises:
        DataError: it is malformed, or outside of the rows.
    """
    import datasets

    name = split.partition("[")[0]
    try:
        (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: rows})
    except (ValueError, AssertionError) as error:
        raise DataError(f"split {split!r} of {counted(rows, 'row')}: {_reason(error)}") from error
    return part.from_ or 0, rows if part.to is None else part.to


def _read(path: str, kind: str, read: Callable[[str], Any]) -> Any:
    import datasets

    quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return read(_existing(path))
    except DataError:
        raise
    except Exception as error:  # Arrow and the builders raise different types
        raise DataError(f"{path}: truncated, damaged or no {kind} ({_reason(error)}); write it again") from error
    finally:
        if not quiet:
            datasets.enable_progress_bars()


def _existing(path: str) -> str:
    expanded = os.path.expanduser(path)
    if not os.path.exists(expanded):
        raise DataError(f"{path}: no such data file{missing_path_hint(path)}")
    if reason := special_file(expanded):
        raise DataError(reason)
    return expanded


def _is_arrow_file(path: str) -> bool:
    """Whether an Arrow file has the form with an index at its end, which begins with a magic number."""
    with open(path, "rb") as file:
        return file.read(6) == b"ARROW1"


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: the builders of datasets wrap the errors of Arrow."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return (lines[0][:200] if lines else "") or type(error).__name__


FREE_BYTES = 1 << 32
MAX_EXPANSION = 1000
"""Largest ratio of decoded to stored bytes, of a file of more than FREE_BYTES decoded bytes; repeated system prompts
reach hundreds."""
_VALUE_BYTES = 8
"""Decoded bytes of a number; 0 stored bytes may represent many equal numbers."""


def check_decoded_size(path: str, shown: str) -> None:
    """Refuse a parquet file that expands too much; reads its metadata and, where needed, its dictionaries.

    Args:
        shown: the file's name for messages.

    Raises:
        DataError: its content has more than FREE_BYTES bytes and MAX_EXPANSION times those of the file.
    """
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = [file.schema.column(number).path for number in range(len(file.schema))]
    limit = max(FREE_BYTES, MAX_EXPANSION * os.path.getsize(path))
    with pyarrow.parquet.ParquetFile(path, read_dictionary=columns) as file:
        size = 0
        for expanded in _sizes(file, limit):
            size += expanded
            if size > limit:
                raise DataError(
                    f"{shown}: its content is more than {MAX_EXPANSION:,} times as large as the file and has more than "
                    f"{FREE_BYTES >> 20:,} MiB; write it again without dictionaries and compression if that is intended"
                )


def _sizes(file: pyarrow.parquet.ParquetFile, limit: int) -> Iterator[int]:
    """Decoded bytes of each part of each column, or an upper bound where it is at most the part's share of the
    limit."""
    metadata = file.metadata
    share = limit // max(1, metadata.num_row_groups * metadata.num_columns)
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            num_bytes, count = column.total_uncompressed_size, column.num_values
            if column.physical_type != "BYTE_ARRAY":
                yield max(num_bytes, count * _VALUE_BYTES)
                continue
            yield num_bytes
            if not column.has_dictionary_page or count * num_bytes <= share:
                continue
            entries = count * _longest_entry(file, group, column.path_in_schema)
            if entries <= share:
                yield entries
            else:
                yield from _texts(file, group, column.path_in_schema)


def _longest_entry(file: pyarrow.parquet.ParquetFile, group: int, column: str) -> int:
    """Bytes of the longest entry of a column's dictionary, which the first rows with a value have as a whole."""
    import pyarrow.compute

    for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[column]):
        entries = [texts.dictionary for part in batch.columns for texts in _texts_in(part) if len(texts.dictionary)]
        if entries:
            return max(pyarrow.compute.max(pyarrow.compute.binary_length(entry)).as_py() for entry in entries)
    return 0


def _texts(file: pyarrow.parquet.ParquetFile, group: int, column: str) -> Iterator[int]:
    """Bytes of a column's texts, counted without decoding them."""
    import pyarrow.compute

    for batch in file.iter_batches(batch_size=4096, row_groups=[group], columns=[column]):
        for part in batch.columns:
            for texts in _texts_in(part):
                lengths = pyarrow.compute.binary_length(texts.dictionary).cast("int64")
                yield pyarrow.compute.sum(lengths.take(texts.indices)).as_py() or 0


def _texts_in(array: Any) -> Iterator[Any]:
    """The dictionary arrays in a nested array."""
    import pyarrow.types

    if pyarrow.types.is_dictionary(array.type):
        yield array
    elif pyarrow.types.is_map(array.type):
        yield from _texts_in(array.keys)
        yield from _texts_in(array.items)
    elif pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
        yield from _texts_in(array.flatten())
    elif pyarrow.types.is_struct(array.type):
        for field in array.flatten():
            yield from _texts_in(field)
