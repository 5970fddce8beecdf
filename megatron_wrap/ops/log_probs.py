"""Log-probabilities and maxima of vocabulary-parallel logits, without gathering the vocabulary.

Logits are [B, S, V/tp]: each tensor-parallel rank holds the columns `rank * V/tp` onwards. The loss that is made of the
results is replicated over TP, so sums over TP have an identity backward here: each rank's gradient is that of its own
columns. Work goes chunk by chunk over tokens; beyond inputs, outputs and the gradient it needs at most
`CHUNK_BYTES` and a few numbers per token.
"""

from __future__ import annotations

import importlib.util
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
        columns = logits.shape[-1]
        flat = logits.detach().reshape(-1, columns)
        local_ids = ids.reshape(-1) - group.rank() * columns
        kernels = _kernels(flat)
        highest, total, picked = (kernels.normalizer_parts if kernels else _normalizer_parts)(flat, local_ids)
        highest_anywhere = highest.clone()
        reduce_in_place(highest_anywhere, "max", group)
        sums = torch.stack((total * (highest - highest_anywhere).exp(), picked))
        reduce_in_place(sums, "sum", group)
        log_normalizer = highest_anywhere + sums[0].log()
        ctx.save_for_backward(logits, local_ids, log_normalizer)
        return (sums[1] - log_normalizer).view(ids.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits, local_ids, log_normalizer = ctx.saved_tensors
        flat = logits.detach().reshape(-1, logits.shape[-1])
        grad_out = grad_outputs[0].reshape(-1).to(log_normalizer.dtype).contiguous()
        kernels = _kernels(flat)
        gradient = kernels.log_prob_gradient if kernels else _log_prob_gradient
        return gradient(flat, local_ids, log_normalizer, grad_out).view(logits.shape), None, None


def _kernels(logits: Tensor) -> Any:
    """The Triton kernels where they can run, else None: the torch code below is the same, a little slower."""
    if logits.device.type != "cuda" or logits.dtype == torch.float64 or not importlib.util.find_spec("triton"):
        return None
    from megatron_wrap.ops import triton_log_probs

    return triton_log_probs


def _normalizer_parts(logits: Tensor, local_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [N, V/tp]: maximum, sum of exp(logit - maximum), and the logit of each local id (0 where it is outside
    this rank's columns), each [N]."""
    columns, dtype = logits.shape[-1], _compute_dtype(logits)
    highest = logits.amax(dim=-1).to(dtype)
    total = torch.empty_like(highest)
    for rows in _chunks(logits.shape[0], columns, dtype.itemsize):
        total[rows] = logits[rows].to(dtype, copy=True).sub_(highest[rows, None]).exp_().sum(dim=-1)
    picked = logits.gather(1, local_ids.clamp(0, columns - 1)[:, None]).squeeze(1).to(dtype)
    return highest, total, torch.where(_owned(local_ids, columns), picked, 0.0)


def _log_prob_gradient(logits: Tensor, local_ids: Tensor, log_normalizer: Tensor, grad_out: Tensor) -> Tensor:
    """onehot * g - softmax * g, for this rank's columns."""
    columns, dtype = logits.shape[-1], log_normalizer.dtype
    grad = torch.empty_like(logits)
    one_hot = torch.where(_owned(local_ids, columns), grad_out, 0.0)[:, None]
    places = local_ids.clamp(0, columns - 1)[:, None]
    for rows in _chunks(logits.shape[0], columns, dtype.itemsize):
        part = logits[rows].to(dtype, copy=True).sub_(log_normalizer[rows, None]).exp_().mul_(-grad_out[rows, None])
        grad[rows] = part.scatter_add_(1, places[rows], one_hot[rows])
    return grad


def _owned(local_ids: Tensor, columns: int) -> Tensor:
    return (local_ids >= 0) & (local_ids < columns)


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
