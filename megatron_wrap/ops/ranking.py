"""The most likely ids of each token over a vocabulary that tensor-parallel ranks share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.errors import FlowError
from megatron_wrap.ops.vocabulary import check_logits, compute_dtype, owned_places, token_blocks
from megatron_wrap.parallel.collectives import ProcessGroup, gather_tensors
from megatron_wrap.parallel.state import tensor_parallel_group

_ID_BYTES = 8


class TopK(NamedTuple):
    """Some ids of each token with their values, equal on every tensor-parallel rank."""

    values: Tensor
    """[B, S, k] logits or log-probabilities."""
    ids: Tensor
    """[B, S, k] global ids, distinct within a token."""


def top_k(logits: Tensor, k: int, group: ProcessGroup | None = None) -> TopK:
    """The k largest logits of each token over the whole vocabulary, in falling order, and their ids.

    Between equal logits torch's `topk` chooses. The columns of a padded vocabulary come last: k must not be larger than
    the true vocabulary. log_probs = values - logsumexp of all logits; `gather_log_probs(logits, ids)` gives them.

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        k: 1 <= k <= V.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        values [B, S, k] in the logits' type, whose gradient goes to the chosen logits; ids [B, S, k], int64.

    Raises:
        FlowError: k is outside 1 <= k <= V, or the logits are not floating.
    """
    check_logits("logits", logits)
    group = group or tensor_parallel_group()
    vocabulary = logits.shape[-1] * group.size()
    if not 1 <= k <= vocabulary:
        raise FlowError(f"top_k of k={k} needs 1 <= k <= {vocabulary}, the (padded) vocabulary")
    return TopK(*_TopK.apply(logits, k, group))


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        columns, ranks = logits.shape[-1], group.size()
        values = logits.new_empty(*logits.shape[:-1], k)
        ids = torch.empty_like(values, dtype=torch.int64)
        local_k = min(k, columns)
        # torch's topk may copy its input; candidates are held once by rank and once joined, then the best of them
        token_bytes = columns * logits.dtype.itemsize
        token_bytes += (2 * ranks + 3) * local_k * (logits.dtype.itemsize + _ID_BYTES)
        for block in token_blocks(logits.shape[:-1], token_bytes):
            best, places = logits[block].topk(local_k, dim=-1)
            places += group.rank() * columns
            if ranks > 1:
                candidates = torch.cat(gather_tensors(places, group), dim=-1)
                best, order = torch.cat(gather_tensors(best, group), dim=-1).topk(k, dim=-1)
                places = candidates.gather(-1, order)
            values[block], ids[block] = best, places
            del best, places
        ctx.save_for_backward(ids)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)  # else torch makes zeros of the ids' size for them
        ctx.columns, ctx.group = columns, group
        return values, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        outer = grad_outputs[0]
        if outer is None:
            return None, None, None
        grad = outer.new_empty(*ids.shape[:-1], ctx.columns)
        # on a CPU torch's scatter_add makes copies of half-precision tensors; in fp32 it makes none
        dtype = compute_dtype(outer)
        for block in token_blocks(ids.shape[:-1], ctx.columns * dtype.itemsize + ids.shape[-1] * 5 * _ID_BYTES):
            places, owned = owned_places(ids[block], ctx.columns, ctx.group)
            part = torch.zeros(*places.shape[:-1], ctx.columns, dtype=dtype, device=outer.device)
            grad[block] = part.scatter_add_(-1, places, outer[block].to(dtype).masked_fill(~owned, 0.0))
            del places, owned, part  # not held while the next block is made
        return grad, None, None
