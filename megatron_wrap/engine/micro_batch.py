"""A micro-batch on its way from the flow to the model: collated, counted, padded, split, on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_wrap.errors import FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.parallel import context
from megatron_wrap.parallel.state import ParallelState

DEFAULT_TERM = ""
"""Name of the one term of a flow whose `get_loss_weight` gives a number."""


PADDING_MASK = "padding_mask"
"""Model input of a model with experts: bool [B, S], True on padding, which the routers leave out of their losses."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of this replica, whole after `collate`, this process's part of it after `localize`."""

    model_inputs: dict[str, Tensor | None]
    loss_inputs: dict[str, Tensor]
    weights: dict[str, float]
    """Loss weight of each term, on the whole micro-batch."""
    num_samples: int
    """Samples that it was made of."""
    lengths: Tensor
    """[B] tokens of each sequence, without padding; a flow may make several sequences of a sample."""
    width: int
    """Sequence length of the collated tensors."""
    padded_width: int = 0
    """Sequence length on the layout, over all context-parallel ranks; 0 before `localize`."""
    counted: bool = True
    """False for a filler that keeps an idle replica in step; it adds nothing to any sum."""
    says_weight: bool = True
    """False where the flow does not say what its loss is a mean over; the micro-batch then counts as 1."""

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.lengths.shape[0]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random generators that are alike on all processes of a replica and do not touch the training's own."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def collate(flow: MegatronWrapTrainingFlowBase, samples: Sequence[Any], seed: int) -> MicroBatch:
    """Let the flow make tensors of these samples, and count them.

    Args:
        seed: for random choices of the flow; a function of the first sample's place in the run, not of the layout.

    Raises:
        FlowError: the flow breaks its contract.
    """
    usual_size, flow.micro_batch_size = flow.micro_batch_size, len(samples)
    iterator = iter(samples)
    try:
        with _seeded(seed):
            collated = flow.collate_data_micro_batch(iterator)
    except StopIteration:
        raise FlowError(
            f"{type(flow).__name__}.collate_data_micro_batch asks for more than self.micro_batch_size = {len(samples)} "
            "samples; call next(iterator) that many times"
        ) from None
    finally:
        flow.micro_batch_size = usual_size
    left = sum(1 for _ in iterator)
    if left:
        raise FlowError(
            f"{type(flow).__name__}.collate_data_micro_batch leaves {left} of self.micro_batch_size = {len(samples)} "
            "samples in the iterator, so they would never be trained on; call next(iterator) that many times"
        )
    model_inputs, loss_inputs = _checked(flow, collated)
    flow.validate_model_forward_inputs(model_inputs)
    width = _common_width(flow, model_inputs, loss_inputs)
    lengths = _lengths(flow, model_inputs, width)
    inputs: dict[str, Tensor | None] = dict(model_inputs)
    if "attention_mask" in inputs:
        # Attention is causal and padding stands on the right, where no token sees it: no mask is needed, and the
        # fast kernels take none.
        inputs["attention_mask"] = None
    said = flow.get_loss_weight(loss_inputs)
    weights = _weights(flow, 1.0 if said is None else said)
    return MicroBatch(inputs, dict(loss_inputs), weights, len(samples), lengths, width, says_weight=said is not None)


def _weights(flow: MegatronWrapTrainingFlowBase, said: Any) -> dict[str, float]:
    weights = {}
    for term, value in (said if isinstance(said, Mapping) else {DEFAULT_TERM: said}).items():
        try:
            weights[term] = float(value)
        except (TypeError, ValueError, RuntimeError):  # torch raises the last one for a tensor of several elements
            weights[term] = float("nan")
        if not 0 <= weights[term] < float("inf"):
            raise FlowError(
                f"{type(flow).__name__}.get_loss_weight gives {value} for term {term or 'loss'!r}; a weight is a "
                "finite number, 0 or larger"
            )
    return weights


def try_flow(flow: MegatronWrapTrainingFlowBase, samples: Sequence[Any], seed: int) -> None:
    """Collate the first two micro-batches of `samples` (as many as there are) and forget them, so that a breach of the
    contract ends a run before its model is built. Costs what the collation costs: milliseconds; no communication.

    Raises:
        FlowError: the flow breaks its contract. DataError: a sample is wrong.
    """
    size = flow.micro_batch_size
    tried = [collate(flow, samples[start : start + size], seed + start) for start in (0, size) if samples[start:]]
    if not tried:
        return
    terms = [sorted(micro_batch.weights) for micro_batch in tried]
    if terms[0] != terms[-1]:
        raise FlowError(
            f"{type(flow).__name__}.get_loss_weight names the terms {terms[0]} in one micro-batch and {terms[-1]} in "
            "another; name the same ones, with weight 0 where there is nothing"
        )
    unknown = sorted(set(flow.get_loss_coefficients()) - set(terms[0]))
    if unknown:
        raise FlowError(
            f"{type(flow).__name__}.get_loss_coefficients names {', '.join(map(repr, unknown))}, but get_loss_weight "
            f"has the terms {', '.join(map(repr, terms[0]))}; use the same names in both"
        )


def _checked(flow: MegatronWrapTrainingFlowBase, collated: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    name = f"{type(flow).__name__}.collate_data_micro_batch"
    if not (isinstance(collated, tuple) and len(collated) == 2 and all(isinstance(d, Mapping) for d in collated)):
        raise FlowError(f"{name} returns {type(collated).__name__}; return (model_forward_inputs, loss_inputs)")
    for part in collated:
        for field, tensor in part.items():
            if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
                found = f"a tensor on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise FlowError(f"{name}: field {field!r} is {found}; make it a CPU tensor, the engine moves it")
    return collated


def _common_width(flow: MegatronWrapTrainingFlowBase, *parts: Mapping[str, Tensor]) -> int:
    widths: dict[str, int] = {}
    for field, dim in flow.get_fields_and_seqdims().items():
        for part in parts:
            if field in part:
                if not -part[field].dim() <= dim < part[field].dim():
                    raise FlowError(
                        f"{type(flow).__name__}.get_fields_and_seqdims: {field!r} has sequence dimension {dim}, but "
                        f"its shape is {tuple(part[field].shape)}"
                    )
                widths[field] = part[field].shape[dim]
    if not widths:
        raise FlowError(f"{type(flow).__name__}.get_fields_and_seqdims names no field of the collated micro-batch")
    if len(set(widths.values())) > 1:
        raise FlowError(f"{type(flow).__name__}: sequence lengths differ between fields: {widths}")
    width = next(iter(widths.values()))
    if width > flow.seq_length:
        raise FlowError(
            f"{type(flow).__name__} collates sequences of {width} tokens, more than "
            f"megatron_lm.train.common.seq_length {flow.seq_length}"
        )
    return width


def _lengths(flow: MegatronWrapTrainingFlowBase, model_inputs: Mapping[str, Tensor], width: int) -> Tensor:
    mask = model_inputs.get("attention_mask")
    if mask is None:
        batch = next(iter(model_inputs.values())).shape[0]
        return torch.full((batch,), width)
    if mask.dim() != 2:
        raise FlowError(
            f"{type(flow).__name__}: attention_mask has shape {tuple(mask.shape)}; give [B, S], 1 on tokens and 0 on "
            "padding (attention is causal)"
        )
    lengths = (mask != 0).sum(dim=1)
    if not torch.equal(mask != 0, torch.arange(width)[None] < lengths[:, None]):
        raise FlowError(
            f"{type(flow).__name__}: attention_mask has padding on the left of tokens or between them; put padding on "
            "the right"
        )
    return lengths


def padded_width(length: int, parallel: ParallelState, sequence_parallel: bool) -> int:
    """A sequence length, tokens, rounded up to what the layout divides."""
    divisor = context.sequence_divisor(parallel.tp.size, parallel.cp.size, sequence_parallel)
    return -(-length // divisor) * divisor


def localize(
    micro_batch: MicroBatch,
    flow: MegatronWrapTrainingFlowBase,
    width: int,
    parallel: ParallelState,
    device: torch.device,
    with_padding_mask: bool = False,
) -> MicroBatch:
    """Pad to `width`, take this context-parallel rank's part and move it to the device, without waiting for it.

    Args:
        with_padding_mask: add PADDING_MASK to the model's inputs.
    """
    seqdims, pad_values = flow.get_fields_and_seqdims(), flow.get_pad_values()

    def local(field: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if field in seqdims:
            tensor = context.pad_to(tensor, seqdims[field], width, pad_values.get(field, 0))
            tensor = context.split(tensor, seqdims[field], parallel.cp.size, parallel.cp.rank)
        return on_device(tensor)

    def on_device(tensor: Tensor) -> Tensor:
        if device.type == "cuda":
            tensor = tensor.contiguous().pin_memory()
        return tensor.to(device, non_blocking=True)

    loss_inputs = {field: local(field, tensor) for field, tensor in micro_batch.loss_inputs.items()}
    model_inputs = {field: local(field, tensor) for field, tensor in micro_batch.model_inputs.items()}
    if with_padding_mask:
        mask = torch.arange(width)[None] >= micro_batch.lengths[:, None]
        model_inputs[PADDING_MASK] = on_device(context.split(mask, 1, parallel.cp.size, parallel.cp.rank))
    return replace(
        micro_batch,
        padded_width=width,
        model_inputs=model_inputs,
        loss_inputs={field: tensor for field, tensor in loss_inputs.items() if tensor is not None},
    )
