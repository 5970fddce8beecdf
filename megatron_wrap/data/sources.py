"""The samples that the configuration names: the training set and the evaluation sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_wrap.config.schema import DataConfig
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


def training_samples(data: DataConfig) -> Sequence[Any]:
    """The training set of `megatron_wrap.data`.

    Raises:
        DataError: the configuration names none.
    """
    if data.data_key == "mock":
        return NumberedSamples(data.num_samples)
    if data.train is None:
        raise DataError(
            "no training data: give wrap.batches(samples), or select megatron_wrap.data jsonl and set its key train"
        )
    return JsonLines(data.train)


def first_training_samples(data: DataConfig, count: int) -> list[Any]:
    """The head of the training set, `count` samples at most; empty where the configuration names none. Does not read
    the rest of the file."""
    if data.data_key == "mock":
        return list(NumberedSamples(data.num_samples)[:count])
    return [] if data.train is None else JsonLines(data.train).head(count)


def validation_sets(data: DataConfig) -> dict[str, Sequence[Any]]:
    """Name -> evaluation set of `megatron_wrap.data`; empty where it names none."""
    return {name: JsonLines(path) for name, path in data.validation.items()}
