"""Log-probabilities and maxima of vocabulary-parallel logits, without gathering the vocabulary.

Logits are [B, S, V/tp]: each tensor-parallel rank holds the columns `rank * V/tp` onwards. The loss that is made of the
results is replicated over TP, so sums over TP have an identity backward here: each rank's gradient is that of its own
columns. Work goes chunk by chunk over tokens; beyond inputs, outputs and the gradient it needs at most
`CHUNK_BYTES` and a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.parallel.collectives import ProcessGroup, reduce_in_place
from megatron_wrap.parallel.state import tensor_parallel_group

CHUNK_BYTES = 256 * 2**20
"""Bound of the fp32 working memory of one chunk of tokens, bytes."""


def token_log_probs(logits: Tensor, ids: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Log-probability of each id, fp32 (float64 for float64 logits).

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        ids: [B, S], global ids, the same on every tensor-parallel rank.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        [B, S], equal on every tensor-parallel rank.
    """
    return _TokenLogProbs.apply(logits, ids, group or tensor_parallel_group())


def vocabulary_max(logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Largest logit of each token over the whole vocabulary: [B, S, V/tp] -> [B, S], equal on every TP rank.

    The gradient goes to the first column (lowest id) that has the maximum.
    """
    return _VocabularyMax.apply(logits, group or tensor_parallel_group())


def _chunks(rows: int, columns: int, element_bytes: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // max(1, columns * element_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, group: ProcessGroup) -> Tensor:
        columns, dtype = logits.shape[-1], _compute_dtype(logits)
        flat = logits.detach().reshape(-1, columns)
        local_ids = ids.reshape(-1) - group.rank() * columns
        owned = (local_ids >= 0) & (local_ids < columns)
        local_ids = local_ids.clamp(0, columns - 1)

        highest = flat.amax(dim=-1).to(dtype)
        reduce_in_place(highest, "max", group)
        sums = torch.empty(2, flat.shape[0], dtype=dtype, device=flat.device)  # sum of exponentials; the id's logit
        for rows in _chunks(flat.shape[0], columns, dtype.itemsize):
            sums[0, rows] = flat[rows].to(dtype).sub_(highest[rows, None]).exp_().sum(dim=-1)
        picked = flat.gather(1, local_ids[:, None]).squeeze(1).to(dtype)
        sums[1] = torch.where(owned, picked, torch.zeros_like(picked))
        reduce_in_place(sums, "sum", group)
        log_normalizer = highest + sums[0].log()
        ctx.save_for_backward(logits, local_ids, owned, log_normalizer)
        return (sums[1] - log_normalizer).view(ids.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits, local_ids, owned, log_normalizer = ctx.saved_tensors
        columns, dtype = logits.shape[-1], log_normalizer.dtype
        flat = logits.detach().reshape(-1, columns)
        grad_out = grad_outputs[0].reshape(-1).to(dtype)
        grad = torch.empty_like(flat)
        for rows in _chunks(flat.shape[0], columns, dtype.itemsize):
            part = flat[rows].to(dtype).sub_(log_normalizer[rows, None]).exp_().mul_(-grad_out[rows, None])
            # the one-hot term, where this rank holds the id
            part.scatter_add_(1, local_ids[rows, None], torch.where(owned[rows], grad_out[rows], 0)[:, None])
            grad[rows] = part
        return grad.view(logits.shape), None, None


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
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        index, owned = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=grad_outputs[0].dtype, device=index.device)
        grad.scatter_(-1, index.unsqueeze(-1), torch.where(owned, grad_outputs[0], 0).unsqueeze(-1))
        return grad, None
