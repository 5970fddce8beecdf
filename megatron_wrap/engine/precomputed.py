"""Outputs of a reference model that were computed before training: stored by `precompute`, added to samples by hash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_wrap.config.schema import ModelsConfig, RunConfig
from megatron_wrap.data.precomputed import PrecomputedOutputs, PrecomputedWriter, sample_hash
from megatron_wrap.engine.forward import forward
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.engine.step_values import PREFIX as STEP_PREFIX
from megatron_wrap.engine.tokenized import tokenizer_key
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.parallel.agreement import on_rank_0


def use_precomputed(flow: MegatronWrapTrainingFlowBase, config: RunConfig) -> None:
    """Let the flow's `prepare_sample` receive each sample with the stored outputs of the reference model as
    `reference_NAME`, if the run has `precomputed`.

    Raises:
        DataError: there are no outputs. ConfigError: they were computed for another flow, tokenizer or sequence length.
    """
    settings = config.models.second
    if settings is None or settings.precomputed is None:
        return
    stored = PrecomputedOutputs(settings.precomputed)
    facts = facts_of(flow, config)
    for name, value in facts.items():
        if stored.facts.get(name) != value:
            raise ConfigError(
                f"{config.models.path}: the outputs in {stored.folder} were computed with another {name}: "
                f"{stored.facts.get(name)} there and {value} here; run megatron-wrap precompute with this "
                f"configuration, or set {name} back"
            )
    flow.prepare_sample = _with_outputs(stored, flow.prepare_sample, config.models)  # type: ignore[assignment, method-assign]


def facts_of(flow: MegatronWrapTrainingFlowBase, config: RunConfig) -> dict[str, Any]:
    """What stored outputs depend on, beside the sample and the model."""
    return {
        "flow_key": config.flow.flow_key,
        "seq_length": config.train.seq_length,
        "tokenizer": tokenizer_key(flow.context.tokenizer),
    }


def precompute(
    state: TrainingState, samples: Iterable[tuple[str, Any]], folder: str | os.PathLike[str], role: str, skip_bad: bool
) -> int:
    """Store the outputs of the flow's `calculate_outputs` for each sample, with the weights of `state`. Collective.

    Args:
        samples: (FILE:ROW, sample or the DataError of a row that cannot be read), the same on every rank; one that
            comes again is computed once.
        folder: on a file system that rank 0 sees.
        role: "reference" or "teacher", the prefix of the names.
        skip_bad: leave rows out that cannot be used.

    Returns:
        The number of samples stored.

    Raises:
        DataError: on every rank, if a row cannot be used, or there is none.
        CheckpointError: on every rank, if the folder contains outputs already or cannot be written.
    """
    writer: list[PrecomputedWriter] = []  # on rank 0 only
    facts = facts_of(state.flow, state.config)
    on_rank_0(lambda: writer.append(PrecomputedWriter(folder, facts)))
    batch: list[tuple[bytes, Any]] = []
    count = 0
    for item in _distinct(state.flow.prepare_sample, samples, skip_bad):
        batch.append(item)
        if len(batch) == state.config.train.global_batch_size:
            count += _store(state, batch, writer, role)
            batch = []
    if batch:
        count += _store(state, batch, writer, role)
    if not count:
        raise DataError("there is no sample to precompute; give megatron_wrap.data.train or validation")
    on_rank_0(lambda: writer[0].close())
    return count


def _store(state: TrainingState, batch: list[tuple[bytes, Any]], writer: list[PrecomputedWriter], role: str) -> int:
    samples = [sample for _, sample in batch]
    outputs = forward(state, samples)
    others = state.flow.get_samples_to_precompute([state.flow.prepare_sample(sample) for sample in samples])
    if others is not None:
        of_others = forward(state, [other for other, _ in others])
        for row, (_, kept), found in zip(outputs, others, of_others, strict=True):
            row.update({f"{STEP_PREFIX}{name}": tensor for name, tensor in {**kept, **found}.items()})

    def add() -> None:
        for (key, _), row in zip(batch, outputs, strict=True):
            named = {f"{role}_{name}": tensor for name, tensor in row.items()}
            writer[0].add(key, {name: _array(tensor) for name, tensor in named.items()})

    on_rank_0(add)
    return len(batch)


def _array(tensor: Tensor) -> numpy.ndarray:
    """On the CPU, with a floating point type as fp32."""
    array: numpy.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return array


def _distinct(
    prepare: Callable[[Any], Any], samples: Iterable[tuple[str, Any]], skip_bad: bool
) -> Iterator[tuple[bytes, Any]]:
    """(hash, sample) of each usable sample, once."""
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
        yield key, sample


def _with_outputs(
    stored: PrecomputedOutputs, prepare: Callable[[Any], Any], models: ModelsConfig
) -> Callable[[Any], Any]:
    """`prepare` for samples to which the stored outputs are added."""

    def prepare_with_outputs(sample: Any) -> Any:
        found = stored.get(sample_hash(sample))
        if found is None:
            prepare(sample)  # its own mistake comes first
            raise DataError(
                f"{stored.folder} has no output of the {models.role} model for the sample {_shown(sample)}; run "
                "megatron-wrap precompute with the data of this run"
            )
        both = sorted(found.keys() & sample.keys())
        if both:
            raise DataError(
                f"the sample contains {', '.join(both)}, which {models.path}.precomputed adds; remove them from the "
                f"samples, or set {models.path} to null"
            )
        return prepare({**sample, **{name: _value(value) for name, value in found.items()}})

    return prepare_with_outputs


def _value(value: Any) -> Any:
    return value if isinstance(value, float | int) else torch.from_numpy(value.copy())


def _shown(sample: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in sample.items() if name != "source"}, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
