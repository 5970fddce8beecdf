"""The samples of a run: the training set and the evaluation sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.data.jsonl import JsonLines
from megatron_wrap.errors import DataError


class NumberedSamples(Sequence[dict[str, int]]):
    """`num_samples` samples that contain only their index, for flows that generate their own data."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: Any) -> Any:
        places = range(self._num_samples)[index]
        return [{"index": place} for place in places] if isinstance(places, range) else {"index": places}


def training_samples(file: str | None, mock_samples: int | None = None) -> Sequence[Any]:
    """The training set.

    Args:
        file: a JSON-lines file.
        mock_samples: use this many numbered samples instead.

    Raises:
        DataError: neither is given.
    """
    if mock_samples is not None:
        return NumberedSamples(mock_samples)
    if file is None:
        raise DataError(
            "no training data; call wrap.batches(samples), or select megatron_wrap.data jsonl and set its key train"
        )
    return JsonLines(file)


def first_training_samples(file: str | None, mock_samples: int | None, count: int) -> list[Any]:
    """The first `count` samples of the training set (or all, if fewer), without reading the rest of the file; empty if
    there is no training set."""
    if mock_samples is not None:
        return list(NumberedSamples(mock_samples)[:count])
    return [] if file is None else JsonLines(file).head(count)


def validation_sets(files: Mapping[str, str]) -> dict[str, Sequence[Any]]:
    """Name -> evaluation set, from one JSON-lines file per name."""
    return {name: JsonLines(file) for name, file in files.items()}
