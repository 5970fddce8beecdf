"""Divergence of a student from a teacher of whom only some ids of each token are known; see `kl_divergence`.

With p = softmax(values / T) over the ids K, x_k the student's logits there divided by T, and Z its whole vocabulary's
normalizer:

    forward          sum_K p (log p - log q)                        q = exp(x - log Z)
    jensen_shannon   log 2 + 1/2 sum_K [p (log p - l) + q (log q - l)]    l = log(p + q); q off K adds q log 2
    reverse          sum_K q (log q - log p)                        q = softmax of x over K
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
    compute_dtype,
    floored,
    log_normalizer,
    owned_logits,
    owned_places,
    token_blocks,
)
from megatron_wrap.parallel.collectives import ProcessGroup, reduce_in_place

_KNOWN_ID_NUMBERS = 12  # of 8 bytes for each known id: places, masks, log-probabilities of both, their combinations


def top_k_divergence(
    student_logits: Tensor, teacher: TopK, kind: str, temperature: float, group: ProcessGroup
) -> Tensor:
    """`kl_divergence` for a TopK teacher; arguments and errors as there, kind and temperature already checked."""
    values, ids = teacher
    check_logits("student_logits", student_logits, ("the teacher's values", values), ("the teacher's ids", ids))
    if values.shape != ids.shape:
        raise FlowError(f"the teacher's values {list(values.shape)} and ids {list(ids.shape)} differ in shape")
    if values.requires_grad:
        raise FlowError("a TopK teacher gets no gradient; detach its values, or give the teacher's whole logits")
    return _TopKDivergence.apply(student_logits, values, ids, kind, temperature, group)


class _TopKDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, values: Tensor, ids: Tensor, kind: str, temperature: float, group: ProcessGroup
    ) -> Tensor:
        dtype = compute_dtype(logits, values)
        whole = log_normalizer(logits, dtype, temperature, group) if kind != "reverse" else None
        result = torch.empty(ids.shape[:-1], dtype=dtype, device=logits.device)
        # beside the result, what the backward needs of each token: a normalizer and a mean
        normalizer = torch.empty_like(result) if whole is None else whole
        mean = torch.empty_like(result)
        for block in token_blocks(result.shape, _known_bytes(ids)):
            places, owned = owned_places(ids[block], logits.shape[-1], group)
            log_q = owned_logits(logits[block], places, owned, dtype)
            reduce_in_place(log_q, "sum", group)
            log_q.div_(temperature)
            if kind == "reverse":
                normalizer[block] = log_q.logsumexp(dim=-1)
            floored(log_q.sub_(normalizer[block].unsqueeze(-1)))
            log_p = _teacher(values[block], dtype, temperature)
            result[block], mean[block] = _value_and_mean(kind, log_q, log_p)
            del places, owned, log_q, log_p  # not held while the next block is made
        ctx.save_for_backward(logits, values, ids, normalizer, mean)
        ctx.kind, ctx.temperature, ctx.group = kind, temperature, group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits, values, ids, normalizer, mean = ctx.saved_tensors
        columns, dtype = logits.shape[-1], normalizer.dtype
        grad = torch.empty_like(logits)
        for block in token_blocks(ids.shape[:-1], columns * dtype.itemsize + _known_bytes(ids)):
            places, owned = owned_places(ids[block], columns, ctx.group)
            log_q = owned_logits(logits[block], places, owned, dtype).div_(ctx.temperature)
            floored(log_q.sub_(normalizer[block].unsqueeze(-1)))
            log_p = _teacher(values[block], dtype, ctx.temperature)
            known = _slope_of_known(ctx.kind, log_q, log_p, mean[block].unsqueeze(-1)).masked_fill_(~owned, 0.0)
            part = _slope_of_all(ctx.kind, logits, block, normalizer, mean, ctx.temperature)
            part.scatter_add_(-1, places, known)
            grad[block] = part.mul_(grad_outputs[0][block].unsqueeze(-1) / ctx.temperature)
            del places, owned, log_q, log_p, known, part
        return grad, None, None, None, None, None


def _known_bytes(ids: Tensor) -> int:
    return ids.shape[-1] * _KNOWN_ID_NUMBERS * 8


def _teacher(values: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    return floored((values.to(dtype) / temperature).log_softmax(dim=-1))


def _value_and_mean(kind: str, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Divergence [n], and the mean under q of its derivative by log q [n], which the backward subtracts."""
    if kind == "forward":
        value = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        return value, value  # its backward needs no mean
    if kind == "reverse":
        value = (log_q.exp() * (log_q - log_p)).sum(dim=-1)
        return value, value
    log_sum = torch.logaddexp(log_p, log_q)
    of_p = math.log(2) + (log_p.exp() * (log_p - log_sum)).sum(dim=-1)
    of_q = math.log(2) + (log_q.exp() * (log_q - log_sum)).sum(dim=-1)
    return (of_p + of_q) / 2, of_q


def _slope_of_known(kind: str, log_q: Tensor, log_p: Tensor, mean: Tensor) -> Tensor:
    """[n, K]: what the gradient at the known ids has beyond `_slope_of_all`."""
    if kind == "forward":
        return log_p.exp().neg_()
    if kind == "reverse":
        return log_q.exp() * (log_q - log_p - mean)
    return log_q.exp() * (log_q - torch.logaddexp(log_p, log_q)) / 2


def _slope_of_all(
    kind: str, logits: Tensor, block: Block, normalizer: Tensor, mean: Tensor, temperature: float
) -> Tensor:
    """[n, C]: the gradient by the scaled logits as if every column were off the known ids."""
    if kind == "reverse":
        return torch.zeros_like(logits[block], dtype=normalizer.dtype, memory_format=torch.contiguous_format)
    probability = block_log_probs(logits[block], normalizer[block], temperature).exp_()
    if kind == "forward":
        return probability
    return probability.mul_((math.log(2) - mean[block]).unsqueeze(-1) / 2)
