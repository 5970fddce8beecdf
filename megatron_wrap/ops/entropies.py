"""Entropies of the next-token distribution of vocabulary-parallel logits; `vocabulary.py` has the memory bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.ops.chunks import chunked
from megatron_wrap.ops.vocabulary import (
    block_log_probs,
    check_logits,
    compute_dtype,
    log_normalizer,
    token_blocks,
)
from megatron_wrap.parallel.collectives import ProcessGroup, reduce_in_place
from megatron_wrap.parallel.state import tensor_parallel_group

_BUFFERS = 2  # temporary tensors [tokens, V/tp]


@chunked
def entropy(logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """-sum over the vocabulary of p log p, in nats; fp32 (float64 for float64 logits).

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        [B, S], equal on every tensor-parallel rank. The gradient with respect to logit j is -p_j (log p_j +
        entropy).

    Raises:
        FlowError: the logits are not floating.
    """
    check_logits("logits", logits)
    return _Entropy.apply(logits, group or tensor_parallel_group())


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: ProcessGroup) -> Tensor:
        dtype = compute_dtype(logits)
        normalizer = log_normalizer(logits, dtype, 1.0, group)
        result = torch.empty_like(normalizer)
        for block in token_blocks(result.shape, _BUFFERS * logits.shape[-1] * dtype.itemsize):
            log_probs = block_log_probs(logits[block], normalizer[block], 1.0)
            result[block] = log_probs.exp().mul_(log_probs).sum(dim=-1).neg_()
            del log_probs  # free the memory before the next block
        reduce_in_place(result, "sum", group)
        ctx.save_for_backward(logits, normalizer, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        logits, normalizer, result = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for block in token_blocks(result.shape, _BUFFERS * logits.shape[-1] * normalizer.dtype.itemsize):
            log_probs = block_log_probs(logits[block], normalizer[block], 1.0)
            gradient = log_probs.exp().mul_(log_probs.add_(result[block].unsqueeze(-1)))
            grad[block] = gradient.mul_(-grad_outputs[0][block].unsqueeze(-1))
            del log_probs, gradient  # free the memory before the next block
        return grad, None


@chunked
def collision_entropy(logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Renyi entropy of order 2 of each token's distribution, -log sum p^2, without a gradient.

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        [B, S] fp32 (float64 for float64 logits), equal on every tensor-parallel rank.
    """
    group = group or tensor_parallel_group()
    with torch.no_grad():
        dtype = compute_dtype(logits)
        return 2 * log_normalizer(logits, dtype, 1.0, group) - log_normalizer(logits, dtype, 0.5, group)
