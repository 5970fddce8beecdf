"""Divergence of a student from a teacher with k known ids per token; see `kl_divergence`.

With p = softmax(values / T) over the ids K, x the student's logits at these ids divided by T, and Z the normalizer of
the student's softmax over the whole vocabulary:

    forward          sum_K p (log p - log q)                                     q = exp(x - log Z)
    jensen_shannon   c + sum_K [b p (log p - l) + (1 - b) q (log q - l)]         l = log(b / (1 - b) p + q)
    reverse          sum_K q (log q - log p)                                     q = softmax of x over K

In jensen_shannon b is the teacher's share of the mixture and c = -log(1 - b); each q outside K contributes
(1 - b) q c, which the constant c includes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.errors import FlowError
from megatron_wrap.ops.ranking import TopK
from megatron_wrap.ops.vocabulary import (
    Block,
    block_log_probs,
    check_logits,
    clamp_log_probs,
    columns_below,
    compute_dtype,
    exclude_outside,
    local_indices,
    log_normalizer,
    owned_logits,
    token_blocks,
    with_infinite,
)
from megatron_wrap.parallel.collectives import ProcessGroup, reduce_in_place

_NUMBERS_PER_ID = 12  # 8-byte numbers per known id: index, masks, log-probabilities of both, temporaries


def top_k_divergence(
    student_logits: Tensor,
    teacher: TopK,
    kind: str,
    temperature: float,
    group: ProcessGroup,
    mixture: float = 0.5,
    vocab_size: int | None = None,
) -> Tensor:
    """`kl_divergence` for a TopK teacher, after validation of kind and temperature; same arguments and errors."""
    values, ids = teacher
    check_logits("student_logits", student_logits, ("the teacher's values", values), ("the teacher's ids", ids))
    if values.shape != ids.shape:
        raise FlowError(f"the teacher's values {list(values.shape)} and ids {list(ids.shape)} differ in shape")
    if values.requires_grad:
        raise FlowError("a TopK teacher cannot get a gradient; detach its values, or pass the teacher's whole logits")
    columns = columns_below(vocab_size, student_logits.shape[-1], group)
    return _TopKDivergence.apply(student_logits, values, ids, kind, temperature, group, mixture, columns)


class _TopKDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        values: Tensor,
        ids: Tensor,
        kind: str,
        temperature: float,
        group: ProcessGroup,
        mixture: float,
        columns: int,
    ) -> Tensor:
        dtype = compute_dtype(logits, values)
        known_columns = logits[..., :columns]
        normalizer_of_all = log_normalizer(known_columns, dtype, temperature, group) if kind != "reverse" else None
        result = torch.empty(ids.shape[:-1], dtype=dtype, device=logits.device)
        # saved per token for the backward
        normalizer = torch.empty_like(result) if normalizer_of_all is None else normalizer_of_all
        mean = torch.empty_like(result)
        for block in token_blocks(result.shape, _known_bytes(ids)):
            indices, owned = local_indices(ids[block], logits.shape[-1], group)
            log_q = owned_logits(logits[block], indices, owned, dtype)
            reduce_in_place(log_q, "sum", group)
            exclude_outside(log_q, ids[block], logits, group).masked_fill_(ids[block] < 0, -math.inf)
            log_q.div_(temperature)
            if kind == "reverse":
                normalizer[block] = log_q.logsumexp(dim=-1)
            clamp_log_probs(log_q.sub_(normalizer[block].unsqueeze(-1)))
            log_p = _teacher_log_probs(values[block], dtype, temperature)
            result[block], mean[block] = _value_and_mean(kind, log_q, log_p, mixture)
            del indices, owned, log_q, log_p  # free the memory before the next block
        ctx.save_for_backward(logits, values, ids, normalizer, mean)
        ctx.kind, ctx.temperature, ctx.group, ctx.mixture, ctx.columns = kind, temperature, group, mixture, columns
        return with_infinite(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits, values, ids, normalizer, mean = ctx.saved_tensors
        columns, dtype = logits.shape[-1], normalizer.dtype
        grad = torch.empty_like(logits)
        for block in token_blocks(ids.shape[:-1], columns * dtype.itemsize + _known_bytes(ids)):
            indices, owned = local_indices(ids[block], columns, ctx.group)
            log_q = owned_logits(logits[block], indices, owned, dtype).div_(ctx.temperature)
            clamp_log_probs(log_q.sub_(normalizer[block].unsqueeze(-1)))
            log_p = _teacher_log_probs(values[block], dtype, ctx.temperature)
            of_known = _gradient_of_known(ctx.kind, log_q, log_p, mean[block].unsqueeze(-1), ctx.mixture)
            known = of_known.masked_fill_(~owned, 0.0)
            part = _gradient_of_all(ctx.kind, logits, block, normalizer, mean, ctx.temperature, ctx.mixture)
            part[..., ctx.columns :] = 0.0
            part.scatter_add_(-1, indices, known)
            grad[block] = part.mul_(grad_outputs[0][block].unsqueeze(-1) / ctx.temperature)
            del indices, owned, log_q, log_p, of_known, known, part
        return grad, None, None, None, None, None, None, None


def _known_bytes(ids: Tensor) -> int:
    return ids.shape[-1] * _NUMBERS_PER_ID * 8


def _teacher_log_probs(values: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    return clamp_log_probs((values.to(dtype) / temperature).log_softmax(dim=-1))


def _value_and_mean(kind: str, log_q: Tensor, log_p: Tensor, mixture: float) -> tuple[Tensor, Tensor]:
    """Divergence [n], and the mean under q of its derivative with respect to log q [n], for the backward."""
    if kind == "forward":
        value = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        return value, value  # the backward needs no mean
    if kind == "reverse":
        value = (log_q.exp() * (log_q - log_p)).sum(dim=-1)
        return value, value
    log_sum, constant = _log_sum(log_q, log_p, mixture), -math.log1p(-mixture)
    part_p = constant + (log_p.exp() * (log_p - log_sum)).sum(dim=-1)
    part_q = constant + (log_q.exp() * (log_q - log_sum)).sum(dim=-1)
    return mixture * part_p + (1 - mixture) * part_q, part_q


def _log_sum(log_q: Tensor, log_p: Tensor, mixture: float) -> Tensor:
    """log(b / (1 - b) p + q)."""
    return torch.logaddexp(log_p + (math.log(mixture) - math.log1p(-mixture)), log_q)


def _gradient_of_known(kind: str, log_q: Tensor, log_p: Tensor, mean: Tensor, mixture: float) -> Tensor:
    """Additional gradient at the known ids, [n, K], to be added to `_gradient_of_all`."""
    if kind == "forward":
        return log_p.exp().neg_()
    if kind == "reverse":
        return log_q.exp() * (log_q - log_p - mean)
    return log_q.exp() * (log_q - _log_sum(log_q, log_p, mixture)) * (1 - mixture)


def _gradient_of_all(
    kind: str, logits: Tensor, block: Block, normalizer: Tensor, mean: Tensor, temperature: float, mixture: float
) -> Tensor:
    """Gradient with respect to the scaled logits if no column were a known id, [n, C]."""
    if kind == "reverse":
        return torch.zeros_like(logits[block], dtype=normalizer.dtype, memory_format=torch.contiguous_format)
    probability = block_log_probs(logits[block], normalizer[block], temperature).exp_()
    if kind == "forward":
        return probability
    return probability.mul_((-math.log1p(-mixture) - mean[block]).unsqueeze(-1) * (1 - mixture))
