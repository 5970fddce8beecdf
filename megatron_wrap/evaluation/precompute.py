"""Stores the outputs of a reference model before training, for `megatron-wrap precompute`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy
from torch import Tensor

from megatron_wrap.data.cache.precomputed import PrecomputedWriter, sample_hash
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import DataError
from megatron_wrap.evaluation.evaluate import forward
from megatron_wrap.flow.contract.base import STEP_PREFIX
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.setup.flow import run_metadata


def precompute(
    state: TrainingState, samples: Iterable[tuple[str, Any]], folder: str | os.PathLike[str], role: str, skip_bad: bool
) -> int:
    """Store the outputs of the flow's `calculate_outputs` for each sample, with the weights of `state`. Collective.

    Args:
        samples: (FILE:ROW, sample or the DataError of a row that cannot be read), the same on every rank; equal samples
            are computed once.
        folder: on a file system that rank 0 sees.
        role: "reference" or "teacher", the prefix of the names.
        skip_bad: leave out rows that cannot be used.

    Returns:
        The number of samples stored.

    Raises:
        DataError: on every rank, if a row cannot be used, or there is none.
        CheckpointError: on every rank, if the folder contains outputs already or cannot be written.
    """
    writer: list[PrecomputedWriter] = []  # on rank 0 only
    metadata = run_metadata(state.flow, state.config)
    on_rank_0(lambda: writer.append(PrecomputedWriter(folder, metadata)))
    count, distinct = 0, _distinct(state.prepare_sample, samples, skip_bad)
    while batch := list(itertools.islice(distinct, state.config.train.global_batch_size)):
        count += _store(state, batch, writer, role)
    if not count:
        raise DataError("there is no sample to precompute; give megatron_wrap.data.train or validation")
    on_rank_0(lambda: writer[0].close())
    return count


def _store(state: TrainingState, batch: list[_Usable], writer: list[PrecomputedWriter], role: str) -> int:
    samples = [usable.sample for usable in batch]
    outputs = forward(state, samples, lambda index: batch[index].where)
    others = state.flow.get_samples_to_precompute([state.prepare_sample(sample) for sample in samples])
    if others is not None:
        of_others = forward(state, [other for other, _ in others])
        for row, (_, tensors), other_outputs in zip(outputs, others, of_others, strict=True):
            row.update({f"{STEP_PREFIX}{name}": tensor for name, tensor in {**tensors, **other_outputs}.items()})

    def add() -> None:
        for usable, row in zip(batch, outputs, strict=True):
            named = {f"{role}_{name}": tensor for name, tensor in row.items()}
            writer[0].add(usable.key, {name: _array(tensor) for name, tensor in named.items()})

    on_rank_0(add)
    return len(batch)


def _array(tensor: Tensor) -> numpy.ndarray:
    """The tensor as an array on the CPU, floating-point values in fp32."""
    array: numpy.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return array


class _Usable(NamedTuple):
    """A sample that the flow accepts."""

    key: bytes
    """Hash of the sample."""
    where: str
    """Origin of the sample, `FILE:ROW`."""
    sample: Any


def _distinct(prepare: Callable[[Any], Any], samples: Iterable[tuple[str, Any]], skip_bad: bool) -> Iterator[_Usable]:
    """Each usable sample, once."""
    seen: set[bytes] = set()
    for where, sample in samples:
        try:
            if isinstance(sample, DataError):
                raise sample
            key = sample_hash(sample)
            if key in seen:
                continue
            prepare(sample)
        except DataError as error:
            if skip_bad:
                continue
            raise error if error is sample else DataError(f"{where}: {error}") from error
        seen.add(key)
        yield _Usable(key, where, sample)
