"""Collation of samples to a micro-batch by the flow, checked and counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.collated import (
    check_terms,
    checked_fields,
    common_width,
    loss_weights,
    sequence_lengths,
)
from megatron_wrap.flow.contract.prediction import INPUT_IDS, LABELS, LOSS_MASK, SEQDIMS
from megatron_wrap.flow.contract.routing import NOT_RECORDED, ROUTED_EXPERTS


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the random generators, equally on all processes of a replica; restore the previous states at the end."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPU, for dropout
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def collate(
    flow: MegatronWrapTrainingFlowBase,
    samples: Sequence[Any],
    seed: int,
    name_of: Callable[[int], str] | None = None,
) -> MicroBatch:
    """Collate prepared samples with the flow, check the result and count its weights and tokens.

    Args:
        seed: for random choices of the flow; a function of the first sample's index in the run, not of the layout.
        name_of: index among `samples` -> the sample's name in messages; None: it has none.

    Raises:
        FlowError: the flow breaks its contract. DataError: a sample is wrong; the message begins with its name, if it
            is also wrong when it is collated alone.
    """
    try:
        return _collate(flow, samples, seed)
    except DataError:
        if name_of is not None:
            for index, sample in enumerate(samples):
                try:
                    _collate(flow, [sample], seed)
                except DataError as error:
                    raise DataError(f"{name_of(index)}: {error}") from error
        raise


def _collate(flow: MegatronWrapTrainingFlowBase, samples: Sequence[Any], seed: int) -> MicroBatch:
    iterator = iter(samples)
    try:
        with flow.context.collation.of(len(samples)), _seeded(seed):
            collated = flow.collate_data_micro_batch(iterator)
    except StopIteration:
        raise FlowError(
            f"{type(flow).__name__}.collate_data_micro_batch takes more than self.micro_batch_size = {len(samples)} "
            "samples; call next(iterator) that many times"
        ) from None
    left = sum(1 for _ in iterator)
    if left:
        raise FlowError(
            f"{type(flow).__name__}.collate_data_micro_batch leaves {left} of self.micro_batch_size = {len(samples)} "
            "samples in the iterator, so they would never be trained on; call next(iterator) that many times"
        )
    model_inputs, loss_inputs = checked_fields(flow, collated)
    flow.validate_model_forward_inputs(model_inputs)
    width = common_width(flow, model_inputs, loss_inputs)
    inputs: dict[str, Tensor | None] = dict(model_inputs)
    if "attention_mask" in inputs:
        # attention is causal and padding is on the right, where no token attends to it, so no mask is needed; the
        # fast kernels do not accept one
        inputs["attention_mask"] = None
    weight = flow.get_loss_weight(loss_inputs)
    lengths = sequence_lengths(flow, model_inputs, width)
    seqdims, pad_values = flow.get_fields_and_seqdims(), flow.get_pad_values()
    if flow.context.routing is not None:
        routing = flow.context.routing.collate(samples, lengths, width)
        if routing is not None:
            inputs[ROUTED_EXPERTS] = routing
            seqdims, pad_values = {**seqdims, ROUTED_EXPERTS: 1}, {**pad_values, ROUTED_EXPERTS: NOT_RECORDED}
    collated_by_flow = MicroBatch(
        model_inputs=inputs,
        loss_inputs=dict(loss_inputs),
        weights=loss_weights(flow, 1.0 if weight is None else weight),
        num_samples=len(samples),
        lengths=lengths,
        width=width,
        seqdims=seqdims,
        pad_values=pad_values,
        has_explicit_weight=weight is not None,
        has_loss=bool(flow.has_loss(loss_inputs)),
        sample_facts=tuple(map(flow.get_sample_facts, samples)) if flow.step_values_from else (),
    )
    return _with_predictions(flow, collated_by_flow)


def _with_predictions(flow: MegatronWrapTrainingFlowBase, collated: MicroBatch) -> MicroBatch:
    """The micro-batch with the inputs and loss weights of multi-token prediction, if the model has layers for it."""
    prediction = flow.context.prediction
    if prediction is None:
        return collated
    input_ids, labels, loss_mask = prediction.shifted_inputs(
        collated.model_inputs,
        collated.loss_inputs,
        collated.lengths,
        collated.pad_values.get("input_ids", 0),
        type(flow).__name__,
    )
    return replace(
        collated,
        model_inputs={**collated.model_inputs, INPUT_IDS: input_ids},
        loss_inputs={**collated.loss_inputs, LABELS: labels, LOSS_MASK: loss_mask},
        weights={**collated.weights, **prediction.weights(loss_mask)},
        seqdims={**collated.seqdims, **SEQDIMS},
    )


def of_token_ids(rows: Sequence[Sequence[int]]) -> MicroBatch:
    """A micro-batch of sequences of token ids, without loss inputs, such as those whose logits are read."""
    tokens = pad_sequence([torch.tensor(list(map(int, row))) for row in rows], batch_first=True)
    width = tokens.shape[1]
    positions = torch.arange(width).expand(len(rows), -1)
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": None}
    seqdims = dict.fromkeys(("input_ids", "position_ids"), 1)
    return MicroBatch(inputs, {}, {}, len(rows), torch.tensor(list(map(len, rows))), width, seqdims=seqdims)


def try_flow(flow: MegatronWrapTrainingFlowBase, named: Sequence[tuple[str, Any]], seed: int) -> None:
    """Collate two micro-batches of prepared samples (fewer if there are fewer samples) and discard them, so that a flow
    that breaks its contract fails before the model is built. Takes milliseconds; no communication.

    Args:
        named: the name of each sample in messages, and the sample.

    Raises:
        FlowError: the flow breaks its contract. DataError: a sample is wrong.
    """
    size = flow.micro_batch_size
    parts = [(start, named[start : start + size]) for start in (0, size) if named[start:]]
    tried = [
        collate(flow, [sample for _, sample in part], seed + start, [name for name, _ in part].__getitem__)
        for start, part in parts
    ]
    if tried:
        check_terms(flow, [micro_batch.weights for micro_batch in tried])
        prepared = [sample for _, part in parts for _, sample in part]
        further = flow.get_step_samples(prepared) if flow.step_values_from else None
        if further:
            collate(flow, further[:size], seed)
