"""Values of each token from vocabulary-parallel logits. The logsumexp, the mean over the vocabulary, and logits or
log-probabilities of given ids share one gradient; the k largest logits and their ids have one of their own.
`vocabulary.py` has the memory bound."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.errors import FlowError
from megatron_wrap.ops.token_chunks import chunked
from megatron_wrap.ops.vocabulary import (
    Block,
    check_logits,
    compute_dtype,
    exclude_outside,
    exponentials,
    local_indices,
    log_normalizer,
    masked_below,
    owned_logits,
    token_blocks,
)
from megatron_wrap.parallel.collectives import ProcessGroup, gather_tensors, reduce_in_place
from megatron_wrap.parallel.state import tensor_parallel_group

_ID_SET_BYTES = 40  # per id of a set: index, copies, logit, masks


class TokenTerms(NamedTuple):
    """Terms of a loss with label smoothing and z-loss, [B, S] each, equal on every tensor-parallel rank."""

    log_probs: Tensor
    """Log-probability of the id."""
    mean_log_probs: Tensor
    """Mean of the log-probabilities over the vocabulary."""
    logsumexp: Tensor
    """Logarithm of the sum of exp(logit) over the vocabulary."""


@chunked
def logsumexp(logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """log of the sum of exp(logit) over the whole vocabulary, fp32 (float64 for float64 logits); the coefficient of a
    z-loss multiplies its square.

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        [B, S], equal on every tensor-parallel rank.

    Raises:
        FlowError: the logits are not floating.
    """
    check_logits("logits", logits)
    return _Terms.apply(logits, None, group or tensor_parallel_group(), False, False)[2]


@chunked
def mean_log_probs(logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Mean of the log-probabilities over the vocabulary, for label smoothing; arguments and errors as for `logsumexp`.
    Columns of padding and of -inf are not part of the mean.

    Returns:
        [B, S], equal on every tensor-parallel rank.
    """
    check_logits("logits", logits)
    return _Terms.apply(logits, None, group or tensor_parallel_group(), True, True)[1]


@chunked
def log_probs_and_logsumexp(logits: Tensor, ids: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """`token_log_probs` and `logsumexp` together, [B, S] each; arguments as for `token_terms`."""
    check_logits("logits", logits, ("ids", ids.unsqueeze(-1)))
    log_probs, _, total = _Terms.apply(logits, ids.unsqueeze(-1), group or tensor_parallel_group(), True, False)
    return log_probs.squeeze(-1), total


@chunked
def token_terms(logits: Tensor, ids: Tensor, group: ProcessGroup | None = None) -> TokenTerms:
    """`token_log_probs`, `mean_log_probs` and `logsumexp` together; their backward allocates one gradient.

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        ids: [B, S], global ids, equal on all tensor-parallel ranks; outside the vocabulary as for `token_log_probs`.
        group: the tensor-parallel group; default: the current layout's.
    """
    check_logits("logits", logits, ("ids", ids.unsqueeze(-1)))
    log_probs, mean, total = _Terms.apply(logits, ids.unsqueeze(-1), group or tensor_parallel_group(), True, True)
    return TokenTerms(log_probs.squeeze(-1), mean, total)


@chunked
def gather_logits(logits: Tensor, id_sets: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Logits of K ids per token, fp32 (float64 for float64 logits).

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        id_sets: [B, S, K], global ids, equal on all tensor-parallel ranks, in any order and possibly repeated; outside
            the vocabulary as for `token_log_probs`.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        [B, S, K], equal on every tensor-parallel rank.

    Raises:
        FlowError: the leading dimensions of `id_sets` and `logits` differ.
    """
    check_logits("logits", logits, ("id_sets", id_sets))
    return _Terms.apply(logits, id_sets, group or tensor_parallel_group(), False, False)[0]


@chunked
def gather_log_probs(logits: Tensor, id_sets: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Log-probabilities of K ids per token; arguments, result and errors as for `gather_logits`."""
    check_logits("logits", logits, ("id_sets", id_sets))
    return _Terms.apply(logits, id_sets, group or tensor_parallel_group(), True, False)[0]


def top_k_log_probs(logits: Tensor, k: int, group: ProcessGroup | None = None) -> TopK:
    """The k largest log-probabilities of each token over the whole vocabulary, in descending order, and their ids.

    Arguments and errors as for `top_k`, whose values are logits.

    Returns:
        Differentiable values [B, S, k], fp32 (float64 for float64 logits); ids [B, S, k], int64.
    """
    ids = top_k(logits.detach(), k, group).ids
    return TopK(gather_log_probs(logits, ids, group), ids)


class _Terms(torch.autograd.Function):
    """Values of the ids, mean over the vocabulary, and logsumexp, or None for each. `normalized`: the values and the
    mean are of log-probabilities, else of logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, id_sets: Tensor | None, group: ProcessGroup, normalized: bool, with_mean: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dtype = compute_dtype(logits)
        values = mean = counts = normalizer = None
        if normalized or id_sets is None:
            normalizer = log_normalizer(logits, dtype, 1.0, group)
        if id_sets is not None:
            values = _values_of_ids(logits, id_sets, dtype, group)
        if with_mean:
            mean, counts = _mean_logits(logits, dtype, group)
        if normalized and normalizer is not None:
            values = values if values is None else values.sub_(normalizer.unsqueeze(-1))
            mean = mean if mean is None else mean.sub_(normalizer)
        ctx.save_for_backward(logits, id_sets, normalizer, counts)
        ctx.group, ctx.normalized = group, normalized
        ctx.set_materialize_grads(False)
        return values, mean, normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits, id_sets, normalizer, counts = ctx.saved_tensors
        of_values, of_mean, of_normalizer = grad_outputs
        columns, dtype = logits.shape[-1], compute_dtype(logits)
        grad = torch.empty_like(logits)
        token_bytes = columns * (dtype.itemsize + 1) + (0 if id_sets is None else id_sets.shape[-1] * _ID_SET_BYTES)
        for block in token_blocks(logits.shape[:-1], token_bytes):
            factor = _factor_of_softmax(of_values, of_mean, of_normalizer, block, ctx.normalized)
            if factor is None:
                part = torch.zeros_like(logits[block], dtype=dtype, memory_format=torch.contiguous_format)
            else:
                part = exponentials(logits[block], normalizer[block]).mul_(factor.unsqueeze(-1))
            if of_mean is not None:
                part.add_((of_mean[block] / counts[block]).unsqueeze(-1)).masked_fill_(_masked(logits[block]), 0.0)
            if of_values is not None:
                indices, owned = local_indices(id_sets[block], columns, ctx.group)
                part.scatter_add_(-1, indices, of_values[block].masked_fill(~owned, 0.0))
                del indices, owned
            grad[block] = part
            del part, factor  # free the memory before the next block
        return grad, None, None, None, None


def _factor_of_softmax(
    of_values: Tensor | None, of_mean: Tensor | None, of_normalizer: Tensor | None, block: Block, normalized: bool
) -> Tensor | None:
    """Factor of the softmax in the gradient of one block, [n]; None: the gradient does not contain the softmax."""
    parts = [] if of_normalizer is None else [of_normalizer[block]]
    if normalized and of_values is not None:
        parts.append(-of_values[block].sum(dim=-1))
    if normalized and of_mean is not None:
        parts.append(-of_mean[block])
    return torch.stack(parts).sum(dim=0) if parts else None


def _values_of_ids(logits: Tensor, id_sets: Tensor, dtype: torch.dtype, group: ProcessGroup) -> Tensor:
    """Logits of the ids, [..., K]."""
    values = torch.empty(id_sets.shape, dtype=dtype, device=logits.device)
    for block in token_blocks(id_sets.shape[:-1], id_sets.shape[-1] * _ID_SET_BYTES):
        indices, owned = local_indices(id_sets[block], logits.shape[-1], group)
        values[block] = owned_logits(logits[block], indices, owned, dtype)
        del indices, owned
    reduce_in_place(values, "sum", group)
    for block in token_blocks(id_sets.shape[:-1], id_sets.shape[-1] * _ID_SET_BYTES):
        exclude_outside(values[block], id_sets[block], logits, group)
    return values


def _mean_logits(logits: Tensor, dtype: torch.dtype, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Mean of the logits over the columns that are not masked, and the number of these columns, [...] each."""
    sums = torch.empty(2, *logits.shape[:-1], dtype=dtype, device=logits.device)
    for block in token_blocks(logits.shape[:-1], logits.shape[-1] * (logits.dtype.itemsize + dtype.itemsize + 1)):
        masked = _masked(logits[block])
        sums[0][block] = logits[block].masked_fill(masked, 0.0).sum(dim=-1, dtype=dtype)
        sums[1][block] = logits.shape[-1] - masked.sum(dim=-1, dtype=dtype)
        del masked  # free the memory before the next block
    reduce_in_place(sums, "sum", group)
    return sums[0] / sums[1], sums[1]


def _masked(logits: Tensor) -> Tensor:
    """Mask of the logits that are padding of the vocabulary or -inf, also after a division by a temperature."""
    return logits <= masked_below(logits.dtype)


_ID_BYTES = 8


class TopK(NamedTuple):
    """k ids per token with their values, equal on all tensor-parallel ranks."""

    values: Tensor
    """Logits or log-probabilities, [B, S, k]."""
    ids: Tensor
    """Global ids, distinct within a token, [B, S, k]."""


@chunked
def top_k(logits: Tensor, k: int, group: ProcessGroup | None = None) -> TopK:
    """The k largest logits of each token over the whole vocabulary, in descending order, and their ids.

    Ties are resolved as in torch's `topk`. Padding of the vocabulary ranks last, so k must not exceed the unpadded
    vocabulary size. `gather_log_probs(logits, ids)` returns the log-probabilities of the ids.

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        k: 1 <= k <= V.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        Differentiable values [B, S, k] in the logits' dtype; ids [B, S, k], int64.

    Raises:
        FlowError: k is outside 1 <= k <= V, or the logits are not floating.
    """
    check_logits("logits", logits)
    group = group or tensor_parallel_group()
    vocabulary = logits.shape[-1] * group.size()
    if not 1 <= k <= vocabulary:
        raise FlowError(
            f"top_k with k={k} is out of range; choose 1 <= k <= {vocabulary}, the (padded) vocabulary size"
        )
    return TopK(*_TopK.apply(logits, k, group))


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        columns, ranks = logits.shape[-1], group.size()
        values = logits.new_empty(*logits.shape[:-1], k)
        ids = torch.empty_like(values, dtype=torch.int64)
        local_k = min(k, columns)
        # torch's topk may copy its input; then: each rank's candidates, their concatenation, and the best of them
        token_bytes = columns * logits.dtype.itemsize
        token_bytes += (2 * ranks + 3) * local_k * (logits.dtype.itemsize + _ID_BYTES)
        for block in token_blocks(logits.shape[:-1], token_bytes):
            best, indices = logits[block].topk(local_k, dim=-1)
            indices += group.rank() * columns
            if ranks > 1:
                candidates = torch.cat(gather_tensors(indices, group), dim=-1)
                best, order = torch.cat(gather_tensors(best, group), dim=-1).topk(k, dim=-1)
                indices = candidates.gather(-1, order)
            values[block], ids[block] = best, indices
            del best, indices
        ctx.save_for_backward(ids)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)  # else torch allocates zeros as the gradient of the ids
        ctx.columns, ctx.group = columns, group
        return values, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        grad_out = grad_outputs[0]
        if grad_out is None:
            return None, None, None
        grad = grad_out.new_empty(*ids.shape[:-1], ctx.columns)
        # in fp32, because torch's scatter_add on the CPU copies half-precision tensors
        dtype = compute_dtype(grad_out)
        for block in token_blocks(ids.shape[:-1], ctx.columns * dtype.itemsize + ids.shape[-1] * 5 * _ID_BYTES):
            indices, owned = local_indices(ids[block], ctx.columns, ctx.group)
            part = torch.zeros(*indices.shape[:-1], ctx.columns, dtype=dtype, device=grad_out.device)
            grad[block] = part.scatter_add_(-1, indices, grad_out[block].to(dtype).masked_fill(~owned, 0.0))
            del indices, owned, part  # free the memory before the next block
        return grad, None, None
