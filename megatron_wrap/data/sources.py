"""The samples of a run: the training set and the evaluation sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wrap.data.jsonl import JsonLines
from megatron_wrap.errors import DataError


class NumberedSamples(Sequence[dict[str, int]]):
    """`num_samples` samples that hold only their number, for a flow that makes its own data."""

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
        file: JSON lines.
        mock_samples: this many numbered samples instead.

    Raises:
        DataError: neither is given.
    """
    if mock_samples is not None:
        return NumberedSamples(mock_samples)
    if file is None:
        raise DataError(
            "no training data: give wrap.batches(samples), or select megatron_wrap.data jsonl and set its key train"
        )
    return JsonLines(file)


def first_training_samples(file: str | None, mock_samples: int | None, count: int) -> list[Any]:
    """The head of the training set, `count` samples at most; empty where there is none. Does not read the rest of the
    file."""
    if mock_samples is not None:
        return list(NumberedSamples(mock_samples)[:count])
    return [] if file is None else JsonLines(file).head(count)


def validation_sets(files: Mapping[str, str]) -> dict[str, Sequence[Any]]:
    """Name -> evaluation set, from a JSON lines file for each name."""
    return {name: JsonLines(file) for name, file in files.items()}
