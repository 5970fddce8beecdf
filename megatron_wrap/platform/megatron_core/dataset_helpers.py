"""The C++ functions of Megatron-Core's data sets (`helpers_cpp`, megatron/core/datasets/helpers.cpp) in NumPy, with
equal results, for an installation without the compiled extension."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_wrap.errors import DataError
from megatron_wrap.platform.megatron_core.repairs import hide_log_messages
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

_EXTENSION, _USER = "megatron.core.datasets.helpers_cpp", "megatron.core.datasets.helpers"
_WRITERS = ("megatron.core.datasets.gpt_dataset", "megatron.core.datasets.blended_dataset")


@contextlib.contextmanager
def with_dataset_helpers() -> Iterator[None]:
    """Make Megatron-Core build data sets in memory even without the compiled extension, without its warning that
    nothing was written. Installed from source, Megatron-Core has the extension only after `make -C
    megatron/core/datasets`."""
    with Replacements() as replacements:
        for name in _WRITERS:
            hide_log_messages(name, "path_to_cache is None", replacements)
        try:
            importlib.import_module(_EXTENSION)
        except ImportError:
            for name in (_EXTENSION, _USER):
                replacements.keep_item(sys.modules, name)
            sys.modules[_EXTENSION] = _module()
            sys.modules.pop(_USER, None)
        yield


@contextlib.contextmanager
def arrays_without_pickle() -> Iterator[None]:
    """Make Megatron-Core's data sets read the arrays of an index without pickles. Megatron-Core reads them with
    `allow_pickle=True`, which runs the code that a file names; 0.19 permits a list of names.

    Raises:
        DataError: in the body, if a file is not an array of numbers.
    """
    with Replacements() as replacements:
        for name in _WRITERS:
            module = importlib.import_module(name)
            replacements.set(module, "numpy", _NumPyWithoutPickle())
            if hasattr(module, "safe_numpy_load"):
                replacements.set(module, "safe_numpy_load", _NumPyWithoutPickle.load)
        yield


class _NumPyWithoutPickle:
    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def load(file: Any, mmap_mode: Any = None, **_: Any) -> Any:
        try:
            return np.load(file, mmap_mode=mmap_mode, allow_pickle=False)
        except (ValueError, EOFError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{file} is not an array of numbers ({reason}); delete its folder") from error


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
    """The start of each window: int64 [windows + 1, 2], an index into `document_index` and a token of that document.

    Window i begins at token i * sequence_length of the concatenated documents. At the boundary of two documents, the
    extra token decides whether the start is the end of the first or the beginning of the second.

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
    documents = np.searchsorted(starts, last, side="right") - 1
    offsets = begins - starts[documents]
    past_end = last >= starts[-1] + lengths[-1]
    documents[past_end], offsets[past_end] = len(document_index) - 1, lengths[-1] - add_extra_token
    offsets[0] = documents[0] = 0
    return np.stack([documents, offsets], axis=1)


def blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: Any,
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill, for each of `size` windows, its source and its number in the source: always from the source that lacks most
    of its share, the first of equal ones."""
    shares = np.asarray(weights, dtype=np.float64)
    _blend(dataset_index, dataset_sample_index, shares, np.full(num_datasets, np.inf), size)


def exhaustive_blending_indices(
    dataset_index: np.ndarray, dataset_sample_index: np.ndarray, sizes: Any, num_datasets: int
) -> None:
    """Fill the same arrays as `blending_indices`, with exactly `sizes[i]` windows of source i."""
    limits = np.asarray(sizes, dtype=np.int64)
    _blend(dataset_index, dataset_sample_index, limits / limits.sum(), limits, int(limits.sum()))


def _blend(
    dataset_index: np.ndarray, dataset_sample_index: np.ndarray, shares: np.ndarray, limits: np.ndarray, size: int
) -> None:
    counts = np.zeros(len(shares))
    for window in range(size):
        missing = np.where(counts < limits, shares * max(window, 1) - counts, -np.inf)
        source = int(np.argmax(missing))
        dataset_index[window], dataset_sample_index[window] = source, counts[source]
        counts[source] += 1
