"""Windows of `seq_length` tokens from Megatron's .bin and .idx files, through Megatron-Core's own data sets: the
training order of a run, and its evaluation sets."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wrap.config.checks.vocabulary import check_token_ids
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.cache.verified_folder import write_unless_complete
from megatron_wrap.data.chat.tokenizer import end_token_id
from megatron_wrap.data.indexed.index_files import (
    IndexFile,
    check_content,
    first_tokens,
    read_index,
    some_document_ends_with,
)
from megatron_wrap.data.indexed.preprocess_record import check_vocabulary
from megatron_wrap.data.order.sample_sets import SampleSet
from megatron_wrap.data.order.stream import ShuffledRows, SourceRow
from megatron_wrap.data.sources.rows import Sample
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.utils.atomic_write import named_write_errors

_SPLITS = ("training", "validation", "test")
_TRAINING, _VALIDATION = 0, 1
_KEYS = "megatron_wrap.data"


class Windows:
    """The windows of one data set of Megatron-Core, as samples. See `Rows`.

    A sample has `tokens`, `labels`, `position_ids` (int64 [seq_length]) and `loss_mask` (float32 [seq_length]) as
    `GPTDataset` returns them, the name of its `source` and, in a blend of the training sources, its index as
    `source_id`; with `reset_attention_mask` also `documents`, the tokens of each document, which sum to seq_length.

    Args:
        windows: `GPTDataset` or `BlendedDataset`.
        sources: names of the blended sources, in their order.
        vocab_size: of the model.
        eod: id of the token that ends a document, after which `documents` are split; None: they are not.
        of_training: the sources are those of the training set.
    """

    def __init__(
        self, windows: Any, sources: Sequence[SourceConfig], vocab_size: int, eod: int | None, of_training: bool
    ) -> None:
        self._windows, self._sources, self._vocab_size, self._eod = windows, list(sources), vocab_size, eod
        self._of_training = of_training and len(sources) > 1

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Sample:
        arrays = {name: value.numpy() for name, value in self._windows[index].items() if name != "dataset_id"}
        tokens = arrays["tokens"]
        for ids in (tokens, arrays["labels"]):
            check_token_ids(f"{self.where(index)}: the window", ids, self._vocab_size)
        source = self.row(index).source
        sample: Sample = {**arrays, "source": self._sources[source].name if self._sources else "mock"}
        if self._of_training:
            sample["source_id"] = source
        if self._eod is not None:
            ends = np.flatnonzero(tokens == self._eod) + 1
            sample["documents"] = np.diff(ends, prepend=0, append=len(tokens)).tolist()
            if sample["documents"][-1] == 0:
                del sample["documents"][-1]
        return sample

    def where(self, index: int) -> str:
        """`PREFIX.bin window N`, where N counts the windows of this source from 1."""
        source, row = self.row(index)
        return f"{self._sources[source].path}.bin window {row + 1}" if self._sources else f"mock window {index + 1}"

    def row(self, index: int) -> SourceRow:
        """The source of a window, and its index among the windows of this source."""
        from megatron_wrap.data.indexed.megatron_datasets import source_row

        return source_row(self._windows, index)


class IndexedStream(ShuffledRows):
    """The training windows of a run in the order of Megatron-Core's index, which is shuffled already, repeated
    endlessly. See `SampleStream`."""

    def __init__(self, windows: Windows) -> None:
        super().__init__(windows, seed=0, shuffle=False)
        self.windows = windows

    def row(self, position: int) -> SourceRow:
        """See `SampleStream`."""
        return self.windows.row(position % len(self.windows))


@dataclass(frozen=True)
class IndexedData:
    """The windows of a run."""

    training: IndexedStream
    evaluation: Mapping[str, SampleSet]
    """Name of each evaluation set -> its windows."""


def open_indexed(config: RunConfig, vocab_size: int, tokenizer: Any) -> IndexedData:
    """Open the windows of a run whose data is indexed. One process of each node, or of all nodes that share the cache,
    builds the index; the others wait for it.

    Args:
        vocab_size: of the model.
        tokenizer: of the run, for the id of its eos token; or None.

    Raises:
        DataError: a file is missing or wrong, was written with another vocabulary, a part of `split` has no token, or
            the cache cannot be written.
        ConfigError: documents are to be separated, and the token that ends them is not known.
    """
    data = config.data
    opener = _Opener(config, vocab_size, check_tokens(config, tokenizer))
    if data.mock_data:
        training, validation, _ = opener.splits({}, (), (opener.training_size, opener.evaluation_size or 1, 1))
    elif data.split is not None:
        training, validation = opener.by_split(data.train, data.split)
    else:
        validation = None
        training = opener.separate_files(data.train, _TRAINING)
    evaluation = {
        name: opener.windows(opener.separate_files(sources, _VALIDATION), sources, False)
        for name, sources in data.validation.items()
    }
    if validation is not None:
        evaluation["validation"] = opener.windows(validation, data.train, True)
    return IndexedData(
        IndexedStream(opener.windows(training, data.train, True)),
        {name: SampleSet(windows) for name, windows in evaluation.items()},
    )


def check_indices(config: RunConfig) -> None:
    """Read each index, and count the tokens of each part; nothing is built.

    Raises:
        DataError: as `open_indexed`, but for token ids.
    """
    data, length = config.data, config.train.seq_length
    of_validation = [(sources, _ALL_VALIDATION, None) for sources in data.validation.values()]
    for sources, parts, split in [(data.train, _parts(data.split), data.split), *of_validation]:
        files = [read_index(source.path) for source in sources]
        for index in files:
            check_content(index)
        _windows_of_parts(files, parts, split, length)


def check_tokens(config: RunConfig, tokenizer: Any) -> int | None:
    """Compare the files with the tokenizer; returns the id of the token that ends a document, None if it is not known.

    Raises:
        DataError, ConfigError: as `open_indexed`.
    """
    data, token = config.data, config.data.eod_token
    if tokenizer is not None:
        sources = (*data.train, *(source for each in data.validation.values() for source in each))
        check_vocabulary((source.path for source in sources), tokenizer)
    if token is None and tokenizer is not None and tokenizer.eos_token_id is not None:
        token = end_token_id(tokenizer)
    needed = [name for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask") if getattr(data, name)]
    if needed and token is None:
        raise ConfigError(
            f"{_KEYS}.{needed[0]}: true needs the token that ends a document; give {_KEYS}.tokenizer with an eos "
            f"token, or {_KEYS}.eod_token"
        )
    for source in data.train if needed else ():
        if token is not None and not some_document_ends_with(read_index(source.path), token):
            raise DataError(
                f"{source.path}: none of its first documents ends with token {token}, by which {_KEYS}.{needed[0]} "
                f"separates them; write them with --append-eod and this tokenizer, or set {_KEYS}.eod_token"
            )
    return token


def check_first_tokens(config: RunConfig, vocab_size: int) -> None:
    """Compare the first tokens of each file with the vocabulary; a run compares each window that it reads.

    Raises:
        DataError: a token id is outside the vocabulary.
    """
    data = config.data
    for source in (*data.train, *(source for each in data.validation.values() for source in each)):
        check_token_ids(f"{source.path}.bin", first_tokens(read_index(source.path)), vocab_size)


class _Opener:
    """Opens the data sets of one run."""

    def __init__(self, config: RunConfig, vocab_size: int, eod: int | None) -> None:
        self._config, self._vocab_size, self._eod = config, vocab_size, eod
        train, data = config.train, config.data
        self.training_size = derived.indexed_samples(config)
        self.evaluation_size = None if train.eval_iters is None else train.eval_iters * train.global_batch_size
        self._settings: dict[str, Any] = {
            "random_seed": train.seed,
            "sequence_length": train.seq_length,
            "reset_position_ids": data.reset_position_ids,
            "reset_attention_mask": data.reset_attention_mask,
            "eod_mask_loss": data.eod_mask_loss,
        }

    def windows(self, dataset: Any, sources: Sequence[SourceConfig], of_training: bool) -> Windows:
        """The samples of a data set."""
        eod = self._eod if self._config.data.reset_attention_mask else None
        return Windows(dataset, sources, self._vocab_size, eod, of_training)

    def by_split(self, sources: Sequence[SourceConfig], split: str) -> tuple[Any, Any]:
        """Training and validation from the same prefixes."""
        files = [read_index(source.path) for source in sources]
        windows = _windows_of_parts(files, _parts(split), split, self._config.train.seq_length)
        weights = _weights(sources, files)
        sizes: tuple[int | None, ...] = (self.training_size, None, None)
        if weights is not None:
            sizes = (self.training_size, self.evaluation_size or max(1, windows[1]), max(1, windows[2]))
        blend = ([index.prefix for index in files], weights)
        training, validation, _ = self.splits({"blend": blend, "split": split}, files, sizes)
        return training, validation

    def separate_files(self, sources: Sequence[SourceConfig], split: int) -> Any:
        """The data set of one split (an index of _SPLITS) from all documents of these prefixes."""
        files = [read_index(source.path) for source in sources]
        parts = _parts(None) if split == _TRAINING else _ALL_VALIDATION
        _windows_of_parts(files, parts, None, self._config.train.seq_length)
        # evaluation: each window once, whatever the sources' weights
        weights = _weights(sources, files) if split == _TRAINING else None
        blends: list[Any] = [None, None, None]
        blends[split] = ([index.prefix for index in files], weights)
        sizes: list[int | None] = [0, 0, 0]
        sizes[split] = self.training_size if split == _TRAINING else None
        return self.splits({"blend_per_split": blends}, files, sizes)[split]

    def splits(self, blend: dict[str, Any], files: Sequence[IndexFile], sizes: Sequence[int | None]) -> list[Any]:
        """Megatron-Core's data sets of training, validation and test, from the cache if there is one."""
        from megatron_wrap.data.indexed import megatron_datasets
        from megatron_wrap.platform.megatron_core.dataset_helpers import with_dataset_helpers

        eod = self._vocab_size - 1 if self._eod is None else self._eod
        settings = {**self._settings, **blend, "tokenizer": megatron_datasets.Vocabulary(self._vocab_size, eod)}
        if not files:
            with with_dataset_helpers():
                return megatron_datasets.open_splits(settings, sizes, None)
        key = {**self._settings, **blend, "sizes": list(sizes), "vocabulary": [self._vocab_size, eod]}
        cache = self._cache(key, files)
        with named_write_errors(f"{_KEYS}.cache_dir: the index {cache}", "give a folder that is writable", DataError):
            write_unless_complete(cache, "the index", lambda folder: self._build(settings, sizes, files, folder))
        return megatron_datasets.open_splits(settings, sizes, cache)

    def _build(
        self, settings: dict[str, Any], sizes: Sequence[int | None], files: Sequence[IndexFile], folder: Path
    ) -> None:
        """Write the files of the cache."""
        from megatron_wrap.data.indexed import megatron_datasets
        from megatron_wrap.platform.megatron_core.dataset_helpers import with_dataset_helpers

        megatron_datasets.log_here(f"building the index in {folder.parent}: {_described(files)}")
        for index in files:
            check_content(index)
        with with_dataset_helpers():
            datasets = megatron_datasets.open_splits(settings, sizes, None)
        megatron_datasets.write_cache(datasets, folder)

    def _cache(self, key: Mapping[str, Any], files: Sequence[IndexFile]) -> Path:
        """The folder of the index of these files in their present state."""
        folder = self._config.data.cache_dir
        parent = Path(files[0].prefix).parent / "cache" if folder is None else Path(folder).expanduser()
        stats = [os.stat(f"{index.prefix}.idx") for index in files]
        whole = {**key, "files": [[stat.st_size, stat.st_mtime_ns] for stat in stats]}
        return parent / hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


_Parts = tuple[tuple[float, float], ...]
"""Begin and end of training, validation and test data, as shares of the documents in their order."""
_ALL_VALIDATION: _Parts = ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))


def _parts(split: str | None) -> _Parts:
    first, second, _ = (1.0, 0.0, 0.0) if split is None else derived.split_shares(split)
    return (0.0, first), (first, first + second), (first + second, 1.0)


def _windows_of_parts(files: Sequence[IndexFile], parts: _Parts, split: str | None, length: int) -> list[int]:
    """Whole windows of all prefixes together in each part that is not empty by its share.

    Raises:
        DataError: a prefix has no token in such a part, for which Megatron-Core counts epochs without end (Megatron-LM
            issue 957); or it has no whole window in an evaluation set, which is read once.
    """
    windows = [0, 0, 0]
    for number, (begin, end) in enumerate(parts):
        part = f"the {_SPLITS[number]} part" + (f" of {_KEYS}.split {split}" if split else "")
        for index in files if end - begin > 1e-9 else ():
            documents, tokens = index.part(begin, end)
            whole = max(0, tokens - 1) // length
            windows[number] += whole
            if tokens == 0:
                has = "no document" if documents == 0 else f"{counted(documents, 'empty document')},"
                raise DataError(
                    f"{index.prefix}: {part} has {has} of the {index.documents}; raise its share, write 0 for it, or "
                    "give validation a prefix of its own"
                )
            if number == _VALIDATION and whole == 0:
                raise DataError(
                    f"{index.prefix}: {part} has {counted(tokens, 'token')}, less than a window of seq_length + 1 = "
                    f"{length + 1}; raise its share, give more documents, or lower megatron_lm.train.common.seq_length"
                )
    return windows


def _weights(sources: Sequence[SourceConfig], files: Sequence[IndexFile]) -> list[float] | None:
    """The weights of a blend, by default the sources' numbers of tokens; None for one source."""
    if len(sources) == 1:
        return None
    pairs = zip(sources, files, strict=True)
    return [float(index.tokens) if source.weight is None else source.weight for source, index in pairs]


def _described(files: Sequence[IndexFile]) -> str:
    documents, tokens = sum(index.documents for index in files), sum(index.tokens for index in files)
    return f"{counted(len(files), 'prefix')}, {counted(documents, 'document')}, {counted(tokens, 'token')}"
