"""Validation of a collated micro-batch: fields, sequence lengths, loss weights. No process group, no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.config.checks.vocabulary import check_token_ids
from megatron_wrap.data.chat.encode import IGNORED_LABEL
from megatron_wrap.errors import FlowError
from megatron_wrap.flow.contract.base import MegatronWrapTrainingFlowBase

DEFAULT_TERM = ""
"""Name of the single term of a flow whose `get_loss_weight` returns a number."""


def checked_fields(
    flow: MegatronWrapTrainingFlowBase, collated: Any
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """(model inputs, loss inputs) as `collate_data_micro_batch` returned them.

    Raises:
        FlowError: not a pair of mappings, or a field that is not a CPU tensor.
        DataError: one of the flow's `token_id_fields` has an id outside the vocabulary.
    """
    name = f"{type(flow).__name__}.collate_data_micro_batch"
    if not (isinstance(collated, tuple) and len(collated) == 2 and all(isinstance(d, Mapping) for d in collated)):
        raise FlowError(f"{name} returns {type(collated).__name__}; return (model_forward_inputs, loss_inputs)")
    for part in collated:
        for field, tensor in part.items():
            if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
                kind = f"a tensor on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise FlowError(f"{name}: field {field!r} is {kind}; make it a CPU tensor, the engine moves it")
    model_inputs, loss_inputs = collated
    for field in flow.token_id_fields:
        if field in model_inputs:
            _check_field(flow, field, model_inputs[field], None)
        if field in loss_inputs:
            _check_field(flow, field, loss_inputs[field], loss_inputs)
    return model_inputs, loss_inputs


def _check_field(
    flow: MegatronWrapTrainingFlowBase, field: str, ids: Tensor, loss_inputs: Mapping[str, Tensor] | None
) -> None:
    """Compare a field of token ids with the vocabulary; one without a sequence dimension has no token ids.

    Args:
        loss_inputs: loss inputs of the micro-batch, if the field is one of them; their `loss_mask` shows which ids have
            no loss.
    """
    if ids.dim() < 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        return
    if loss_inputs is not None and ids.numel() and int(ids.min()) < 0:
        mask = loss_inputs.get("loss_mask")
        without_loss = ids == IGNORED_LABEL if mask is None or mask.shape != ids.shape else mask == 0
        ids = ids.masked_fill(without_loss & (ids < 0), 0)
    check_token_ids(f"{type(flow).__name__}: {field}", ids, flow.context.num_token_ids)


def common_width(flow: MegatronWrapTrainingFlowBase, *parts: Mapping[str, Tensor]) -> int:
    """The sequence length in tokens, which must be the same in all fields with a sequence dimension.

    Raises:
        FlowError: a field lacks that dimension, lengths differ, or they exceed the flow's `seq_length`.
    """
    name = type(flow).__name__
    widths: dict[str, int] = {}
    for field, dim in flow.get_fields_and_seqdims().items():
        for part in parts:
            if field in part:
                if not -part[field].dim() <= dim < part[field].dim():
                    raise FlowError(
                        f"{name}.get_fields_and_seqdims: {field!r} has sequence dimension {dim}, but its shape is "
                        f"{tuple(part[field].shape)}"
                    )
                widths[field] = part[field].shape[dim]
    if not widths:
        raise FlowError(
            f"{name}.get_fields_and_seqdims lists no field of the collated micro-batch; list those with a sequence "
            "dimension"
        )
    if len(set(widths.values())) > 1:
        raise FlowError(f"{name}: sequence lengths differ between fields: {widths}; collate them to one length")
    width = next(iter(widths.values()))
    if width > flow.seq_length:
        raise FlowError(
            f"{name} collates sequences of {width} tokens, more than megatron_lm.train.common.seq_length "
            f"{flow.seq_length}; truncate them or raise seq_length"
        )
    return width


def sequence_lengths(flow: MegatronWrapTrainingFlowBase, model_inputs: Mapping[str, Tensor], width: int) -> Tensor:
    """Tokens of each sequence without padding, [B] int64, from the attention mask; `width` if there is no mask.

    Raises:
        FlowError: the mask is not [B, S], or has padding that is not on the right.
    """
    mask = model_inputs.get("attention_mask")
    if mask is None:
        batch = next(iter(model_inputs.values())).shape[0]
        return torch.full((batch,), width)
    name = type(flow).__name__
    if mask.dim() != 2:
        raise FlowError(
            f"{name}: attention_mask has shape {tuple(mask.shape)}; return [B, S], 1 on tokens and 0 on padding "
            "(attention is causal)"
        )
    lengths = (mask != 0).sum(dim=1)
    if not torch.equal(mask != 0, torch.arange(width)[None] < lengths[:, None]):
        raise FlowError(
            f"{name}: attention_mask has padding on the left of tokens or between them; put padding on the right"
        )
    return lengths


def loss_weights(flow: MegatronWrapTrainingFlowBase, returned: Any) -> dict[str, float]:
    """Weight of each term from the return value of `get_loss_weight`, a number or a mapping of terms to numbers.

    Raises:
        FlowError: a weight is not a finite number of at least 0.
    """
    weights = {}
    for term, value in (returned if isinstance(returned, Mapping) else {DEFAULT_TERM: returned}).items():
        try:
            weights[term] = float(value)
        except (TypeError, ValueError, RuntimeError):  # torch raises the last one for a tensor of several elements
            weights[term] = float("nan")
        if not 0 <= weights[term] < float("inf"):
            raise FlowError(
                f"{type(flow).__name__}.get_loss_weight returns {value} for term {term or 'loss'!r}; return a finite "
                "number of at least 0"
            )
    return weights


def check_terms(flow: MegatronWrapTrainingFlowBase, micro_batch_weights: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of the loss terms, sorted; they must be the same in all micro-batches.

    Args:
        micro_batch_weights: term -> weight, for each micro-batch.

    Raises:
        FlowError: micro-batches have different terms, or there is a coefficient without a term.
    """
    name = type(flow).__name__
    terms = sorted(micro_batch_weights[0])
    for weights in micro_batch_weights:
        if sorted(weights) != terms:
            raise FlowError(
                f"{name}.get_loss_weight returns the terms {terms} for one micro-batch and {sorted(weights)} for "
                "another; return the same terms for all, with weight 0 for an empty one"
            )
    unknown = sorted(set(flow.get_loss_coefficients()) - set(terms))
    if unknown:
        raise FlowError(
            f"{name}.get_loss_coefficients returns {', '.join(map(repr, unknown))}, but get_loss_weight has the terms "
            f"{', '.join(map(repr, terms))}; use the same names in both"
        )
    return terms
