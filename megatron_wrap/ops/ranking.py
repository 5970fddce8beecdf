"""Top-k ids of vocabulary-parallel logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.errors import FlowError
from megatron_wrap.ops.chunks import chunked
from megatron_wrap.ops.vocabulary import check_logits, compute_dtype, local_indices, token_blocks
from megatron_wrap.parallel.collectives import ProcessGroup, gather_tensors
from megatron_wrap.parallel.state import tensor_parallel_group

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
