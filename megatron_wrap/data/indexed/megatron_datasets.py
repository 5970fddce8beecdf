"""Builds Megatron-Core's data sets of windows (`GPTDataset`, `BlendedDataset`) with its own builder in one process; all
others open them from a cache. No other file of this folder imports Megatron-Core."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megatron_wrap.data.order.stream import SourceRow
from megatron_wrap.platform.megatron_core.dataset_helpers import arrays_without_pickle
from megatron_wrap.utils.dist_logger import logger


class Vocabulary:
    """The attributes of a tokenizer that Megatron-Core's data sets read."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        self.unique_identifiers = {"vocab_size": vocab_size, "eod": eod}


class LocalBuilder(BlendedMegatronDatasetBuilder):
    """Megatron-Core's builder without its barriers, which all ranks would have to reach together.

    Megatron-Core's builder writes a cache on global rank 0 alone, so a node with another file system has none; and
    0.16's blend asks torch.distributed for its rank where there is no process group.
    """

    @staticmethod
    def build_generic_dataset(cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
        """Build one data set in this process."""
        begun = time.monotonic()
        dataset = cls(*args)
        seconds = time.monotonic() - begun
        if seconds > 1:
            log_here(f"index: {_name(dataset)}: {len(dataset):,} windows in {seconds:.1f} s")
        return dataset

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: list[Any], sizes_per_dataset: list[list[int]]
    ) -> list[list[Any]]:
        """The data sets of each split, in the order of the prefixes."""
        built = [
            self._build_megatron_dataset_splits(prefix, split, sizes, False)
            for prefix, sizes in zip(prefixes, sizes_per_dataset, strict=True)
        ]
        return [list(of_split) for of_split in zip(*built, strict=True)]


def open_splits(settings: dict[str, Any], sizes: Sequence[int | None], cache: Path | None) -> list[Any]:
    """The data sets of training, validation and test; None for one that `settings` do not define.

    Args:
        settings: fields of `GPTDatasetConfig`.
        sizes: windows of each; None: one epoch.
        cache: folder of a complete cache of the same settings and sizes; None: build in memory.
    """
    # an empty path is no cache; None would be a folder beside the data (gpt_dataset.py)
    config = GPTDatasetConfig(
        **settings, path_to_cache="" if cache is None else str(cache), create_attention_mask=False
    )
    kind = MockGPTDataset if config.mock else GPTDataset
    with arrays_without_pickle():
        splits: list[Any] = LocalBuilder(kind, list(sizes), lambda: True, config).build()
    return splits


def write_cache(splits: Sequence[Any], folder: Path) -> None:
    """Write the indices of data sets that were built in memory into a folder, under the names that Megatron-Core
    reads."""
    for top in (split for split in splits if split is not None):
        for part in [*top.datasets, top] if isinstance(top, BlendedDataset) else [top]:
            _write_indices(part, folder)


def _write_indices(part: Any, folder: Path) -> None:
    split: Any
    arrays: tuple[str, ...]
    if isinstance(part, BlendedDataset):
        split, arrays = part.split, ("dataset_index", "dataset_sample_index")
    else:
        split, arrays = part.index_split, ("document_index", "sample_index", "shuffle_index")
    base = f"{part.unique_description_hash}-{type(part).__name__}-{split.name}"
    for name in arrays:
        np.save(folder / f"{base}-{name}.npy", getattr(part, name))
    (folder / f"{base}-description.txt").write_text(part.unique_description, encoding="utf-8")


def source_row(split: Any, index: int) -> SourceRow:
    """The source of a window, and its index among the windows of this source."""
    if isinstance(split, BlendedDataset):
        return SourceRow(int(split.dataset_index[index]), int(split.dataset_sample_index[index]))
    return SourceRow(0, index)


def _name(dataset: Any) -> str:
    if isinstance(dataset, BlendedDataset):
        return f"blend of {len(dataset.datasets)}, {dataset.split.name}"
    return f"{dataset.dataset_path or 'mock data'}, {dataset.index_split.name}"


def log_here(text: str) -> None:
    """Log a line from the process that builds, whatever its rank is."""
    if logger.rank == 0:
        logger.info_rank_0(text)
    else:
        logger.info_all_ranks(text)
