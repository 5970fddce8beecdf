"""Log-probabilities, entropies, and maxima of vocabulary-parallel logits, without gathering the vocabulary.

Logits are [B, S, V/tp]: tensor-parallel rank r holds the V/tp columns from `r * V/tp`. The loss computed from the
results is replicated over TP, so sums over TP have an identity backward: each rank's gradient is that of its own
columns. Tokens are processed in blocks; besides inputs, outputs and the gradient, an operation allocates at most
`CHUNK_BYTES` plus `TOKEN_BYTES` per token (`vocabulary.py`).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.ops.deferred_logits import DeferredLogits, is_deferred
from megatron_wrap.ops.token_chunks import chunked, log_probs_of_loss
from megatron_wrap.ops.vocabulary import (
    CHUNK_BYTES,
    block_log_probs,
    check_logits,
    clamp_log_probs,
    compute_dtype,
    exclude_outside,
    exponentials,
    finite_max,
    local_indices,
    log_normalizer,
    normalizer_parts,
    owned_logits,
    scaled,
    token_blocks,
)
from megatron_wrap.parallel.collectives import ProcessGroup, reduce_in_place
from megatron_wrap.parallel.state import tensor_parallel_group

_CACHE_BYTES = 2**20  # of a block that stays in a CPU's cache, which is three times as fast


def token_log_probs(
    logits: Tensor, ids: Tensor, group: ProcessGroup | None = None, loss_gradient: Tensor | None = None
) -> Tensor:
    """Log-probability of one id per token, fp32 (float64 for float64 logits).

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        ids: [B, S], global ids, equal on all tensor-parallel ranks. A negative id (such as -100) gives a finite but
            meaningless result, which must be masked; an id of padding or above the vocabulary has probability 0, -inf.
        group: the tensor-parallel group; default: the current layout's.
        loss_gradient: [B, S], the derivative of the flow's `loss_sum` with respect to the result, if it is known
            beforehand: with logits that are not stored their gradient is then computed in the forward pass, which saves
            computing them again in the backward pass. Another upstream gradient is also correct, and slower.

    Returns:
        [B, S], equal on every tensor-parallel rank.
    """
    group = group or tensor_parallel_group()
    if isinstance(logits, DeferredLogits) and is_deferred(logits):
        overwrite = logits.projection.softcap is None  # else the gradient of the cap reads them

        def of_chunk(chunk: Tensor, chunk_ids: Tensor) -> Tensor:
            return _TokenLogProbs.apply(chunk, chunk_ids, group, False, overwrite)

        return log_probs_of_loss(of_chunk, logits, ids, loss_gradient)
    return _TokenLogProbs.apply(logits, ids, group, False, False)


@chunked
def log_probs_and_entropy(logits: Tensor, ids: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """`token_log_probs`, and the entropy -sum p log p of each token's distribution in nats, for a metric: from the same
    pass over the logits, without a gradient. For a loss of the entropy see `entropy`.

    Returns:
        [B, S] each, equal on every tensor-parallel rank.
    """
    log_probs, entropies = _TokenLogProbs.apply(logits, ids, group or tensor_parallel_group(), True, False)
    return log_probs, entropies


@chunked
def vocabulary_max(logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Largest logit of each token over the whole vocabulary: [B, S, V/tp] -> [B, S], equal on every TP rank.

    The gradient goes to the lowest id among equal maxima.
    """
    return _VocabularyMax.apply(logits, group or tensor_parallel_group())


class _TokenLogProbs(torch.autograd.Function):
    """`overwrite`: the backward may write the gradient over the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, group: ProcessGroup, with_entropy: bool, overwrite: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        columns = logits.shape[-1]
        local_ids = ids.long() - group.rank() * columns
        kernels, kept, weighted = _kernels(logits), None, None
        if kernels:
            flat = logits.detach().view(-1, columns)
            parts = kernels.normalizer_parts(flat, local_ids.reshape(-1).contiguous(), with_entropy)
            highest, total, picked = (part.view(ids.shape) for part in parts[:3])
            weighted = None if parts[3] is None else parts[3].view(ids.shape)
        else:
            dtype = compute_dtype(logits)
            further = _CACHE_BYTES if with_entropy else 0
            if ctx.needs_input_grad[0] and logits.dtype == dtype and logits.nbytes + further <= CHUNK_BYTES:
                # small enough to keep: the backward turns them into the gradient without another allocation
                highest = finite_max(logits, dtype)
                kept = exponentials(logits, highest)
                total = kept.sum(dim=-1)
                weighted = _weighted_in_blocks(logits, highest, kept) if with_entropy else None
            elif with_entropy:
                highest, total, weighted = _entropy_parts(logits, dtype)
            else:
                highest, total = normalizer_parts(logits, dtype, limit=CHUNK_BYTES)
            indices, owned = local_indices(ids.unsqueeze(-1), columns, group)
            picked = owned_logits(logits, indices, owned, dtype).squeeze(-1)
        highest_anywhere = highest.clone()
        reduce_in_place(highest_anywhere, "max", group)
        below = (highest - highest_anywhere).clamp_(min=torch.finfo(highest.dtype).min)  # not -inf: 0 * below is 0
        rows = [total * below.exp(), picked]
        if weighted is not None:  # each rank's maximum replaced by that of all ranks
            rows.append(weighted * below.exp() + rows[0] * below)
        sums = torch.stack(rows)
        reduce_in_place(sums, "sum", group)
        log_total = sums[0].log()
        log_normalizer = highest_anywhere + log_total
        ctx.save_for_backward(logits, local_ids, highest, log_normalizer)
        ctx.kept, ctx.overwrite = kept, overwrite
        log_probs = exclude_outside(sums[1], ids, logits, group) - log_normalizer
        if weighted is None:
            return log_probs
        entropies = log_total - sums[2] / sums[0]
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, local_ids, highest, log_normalizer = ctx.saved_tensors
        grad_out = grad_outputs[0].to(log_normalizer.dtype)
        kernels = _kernels(logits)
        if kernels:
            flat = logits.detach().view(-1, logits.shape[-1])
            rows = (tensor.reshape(-1).contiguous() for tensor in (local_ids, log_normalizer, grad_out))
            grad = kernels.log_prob_gradient(flat, *rows, grad=flat if ctx.overwrite else None)
            return grad.view(logits.shape), None, None, None, None
        kept, ctx.kept = ctx.kept, None  # a second backward through the same graph recomputes it
        factor = (highest - log_normalizer).exp_().mul_(-grad_out)
        if kept is not None:
            return _add_one_hot(kept.mul_(factor.unsqueeze(-1)), local_ids, grad_out), None, None, None, None
        return _log_prob_gradient(logits, local_ids, highest, factor, grad_out), None, None, None, None


def _kernels(logits: Tensor) -> Any:
    """The Triton kernels if they support the logits, else None: the equivalent torch code is a little slower."""
    if logits.device.type != "cuda" or logits.dtype == torch.float64 or not logits.is_contiguous():
        return None
    if not importlib.util.find_spec("triton"):
        return None
    from megatron_wrap.ops import triton_log_probs

    return triton_log_probs


def _entropy_parts(logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's maximum, sum of exp(logit - maximum), and the sum of that times (logit - maximum), each [...]."""
    highest = finite_max(logits, dtype)
    limit = min(_CACHE_BYTES, CHUNK_BYTES) if logits.device.type == "cpu" else CHUNK_BYTES
    total, weighted = torch.empty_like(highest), torch.empty_like(highest)
    for block in token_blocks(total.shape, 2 * logits.shape[-1] * dtype.itemsize, limit):
        part = exponentials(logits[block], highest[block])
        total[block] = part.sum(dim=-1)
        weighted[block] = _weighted_logits(logits[block], highest[block], part)
        del part  # free the memory before the next block
    return highest, total, weighted


def _weighted_in_blocks(logits: Tensor, highest: Tensor, kept: Tensor) -> Tensor:
    weighted = torch.empty_like(highest)
    for block in token_blocks(weighted.shape, logits.shape[-1] * kept.dtype.itemsize, _CACHE_BYTES):
        weighted[block] = _weighted_logits(logits[block], highest[block], kept[block])
    return weighted


def _weighted_logits(logits: Tensor, highest: Tensor, part: Tensor) -> Tensor:
    """Sum of (logit - maximum) * exp(logit - maximum), the latter given as `part`: [n, C], [n] -> [n]."""
    below = clamp_log_probs(scaled(logits, highest.dtype, 1.0).sub_(highest.unsqueeze(-1)))
    return below.mul_(part).sum(dim=-1)


def _log_prob_gradient(logits: Tensor, local_ids: Tensor, highest: Tensor, factor: Tensor, grad_out: Tensor) -> Tensor:
    """onehot * g - softmax * g for this rank's columns, where -softmax * g = exp(logit - highest) * factor."""
    grad = torch.empty_like(logits)
    for block in token_blocks(local_ids.shape, logits.shape[-1] * factor.dtype.itemsize, CHUNK_BYTES):
        part = exponentials(logits[block], highest[block]).mul_(factor[block].unsqueeze(-1))
        grad[block] = _add_one_hot(part, local_ids[block], grad_out[block])
        del part  # free the memory before the next block
    return grad


def _add_one_hot(part: Tensor, local_ids: Tensor, values: Tensor) -> Tensor:
    """Add each token's value to the column of its id, in place, if this rank owns the id."""
    columns = part.shape[-1]
    owned = (local_ids >= 0) & (local_ids < columns)
    indices = local_ids.clamp(0, columns - 1).unsqueeze(-1)
    return part.scatter_add_(-1, indices, values.masked_fill(~owned, 0.0).unsqueeze(-1))


class _VocabularyMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: ProcessGroup) -> Tensor:
        local_highest, index = logits.max(dim=-1)
        highest = local_highest.clone()
        reduce_in_place(highest, "max", group)
        owner = torch.where(local_highest == highest, group.rank(), group.size())
        reduce_in_place(owner, "min", group)
        ctx.save_for_backward(index, owner == group.rank())
        ctx.shape = logits.shape
        return highest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        index, owned = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=grad_outputs[0].dtype, device=index.device)
        grad_out = torch.where(owned, grad_outputs[0], 0).unsqueeze(-1)
        # in blocks, because torch's scatter on the CPU makes an fp32 copy of half-precision tensors
        for block in token_blocks(index.shape, ctx.shape[-1] * 4, CHUNK_BYTES):
            grad[block].scatter_(-1, index[block].unsqueeze(-1), grad_out[block])
        return grad, None


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
