"""Estimates the decoded size of a parquet file, which can be millions of times that of the file: its pages are
compressed, and each value of a column may refer to a long text in a dictionary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_wrap.errors import DataError

if TYPE_CHECKING:
    import pyarrow.parquet

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
            stored, count = column.total_uncompressed_size, column.num_values
            if column.physical_type != "BYTE_ARRAY":
                yield max(stored, count * _VALUE_BYTES)
                continue
            yield stored
            if not column.has_dictionary_page or count * stored <= share:
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
