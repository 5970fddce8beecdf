"""What Megatron-Core's data sets compute in C++ (`helpers_cpp`, megatron/core/datasets/helpers.cpp), in NumPy, for an
installation without the compiled extension; the results are equal."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

_EXTENSION, _USER = "megatron.core.datasets.helpers_cpp", "megatron.core.datasets.helpers"
_WRITERS = ("megatron.core.datasets.gpt_dataset", "megatron.core.datasets.blended_dataset")


@contextlib.contextmanager
def with_dataset_helpers() -> Iterator[None]:
    """Data sets can be built in memory inside, also without the compiled extension, and without a warning for each that
    nothing was written. A source installation of Megatron-Core has the extension only after `make -C
    megatron/core/datasets`."""
    for name in _WRITERS:
        logging.getLogger(name).addFilter(_is_no_warning_of_a_cache)
    substitute = not _has_extension()
    before = {name: sys.modules.pop(name, None) for name in (_EXTENSION, _USER)} if substitute else {}
    if substitute:
        sys.modules[_EXTENSION] = _module()
    try:
        yield
    finally:
        for name in _WRITERS:
            logging.getLogger(name).removeFilter(_is_no_warning_of_a_cache)
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _has_extension() -> bool:
    try:
        importlib.import_module(_EXTENSION)
    except ImportError:
        return False
    return True


def _is_no_warning_of_a_cache(record: logging.LogRecord) -> bool:
    return "path_to_cache is None" not in record.getMessage()


def _module() -> types.ModuleType:
    module = types.ModuleType(_EXTENSION)
    vars(module).update(
        build_sample_idx_int32=lambda *arguments: sample_index(*arguments).astype(np.int32),
        build_sample_idx_int64=sample_index,
        build_blending_indices=blending_indices,
        build_exhaustive_blending_indices=exhaustive_blending_indices,
    )
    return module


def sample_index(
    sizes: np.ndarray,
    document_index: np.ndarray,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token: int = 1,
) -> np.ndarray:
    """Where each window begins: int64 [windows + 1, 2] of a place in `document_index` and a token in its document.

    Window i begins at token i * sequence_length of the documents one after the other; where that is the end of a
    document and the beginning of the next one, the extra token decides which of the two is named.

    Args:
        sizes: tokens of each document.
        document_index: the documents in the order of the epochs.
        add_extra_token: 1 if a window also has the label of its last token.
    """
    lengths = sizes[document_index].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    tokens = int(num_epochs) * int(tokens_per_epoch) - add_extra_token
    if drop_last_partial_sequence:
        count = tokens // sequence_length
    else:
        count = int(np.ceil(np.float32(tokens) / np.float32(sequence_length)))  # helpers.cpp divides floats
    begins = np.arange(count + 1, dtype=np.int64) * sequence_length
    last = np.maximum(begins + add_extra_token - 1, 0)
    places = np.searchsorted(starts, last, side="right") - 1
    offsets = begins - starts[places]
    behind = last >= starts[-1] + lengths[-1]
    places[behind], offsets[behind] = len(document_index) - 1, lengths[-1] - add_extra_token
    offsets[0] = places[0] = 0
    return np.stack([places, offsets], axis=1)


def blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: Any,
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill the source and the number in it of each of `size` windows: always from the source that lacks most of its
    share, the first of equal ones."""
    shares, taken = np.asarray(weights, dtype=np.float64), np.zeros(num_datasets)
    for place in range(size):
        source = int(np.argmax(shares * max(place, 1) - taken))
        dataset_index[place], dataset_sample_index[place] = source, taken[source]
        taken[source] += 1


def exhaustive_blending_indices(
    dataset_index: np.ndarray, dataset_sample_index: np.ndarray, sizes: Any, num_datasets: int
) -> None:
    """As `blending_indices`, with exactly `sizes[i]` windows of source i."""
    limits, taken = np.asarray(sizes, dtype=np.int64), np.zeros(num_datasets)
    shares = limits / limits.sum()
    for place in range(int(limits.sum())):
        error = np.where(taken < limits, shares * max(place, 1) - taken, -np.inf)
        source = int(np.argmax(error))
        dataset_index[place], dataset_sample_index[place] = source, taken[source]
        taken[source] += 1
