"""Log-probabilities and maxima of vocabulary-parallel logits, without gathering the vocabulary.

Logits are [B, S, V/tp]: each tensor-parallel rank holds the columns `rank * V/tp` onwards. The loss that is made of the
results is replicated over TP, so sums over TP have an identity backward here: each rank's gradient is that of its own
columns. Work goes block by block over tokens; beyond inputs, outputs and the gradient it needs at most
`CHUNK_BYTES` and `TOKEN_BYTES` for each token (`vocabulary.py`).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.ops.vocabulary import (
    CHUNK_BYTES,
    check_logits,
    compute_dtype,
    exponentials,
    finite_max,
    log_normalizer,
    normalizer_parts,
    owned_logits,
    owned_places,
    token_blocks,
)
from megatron_wrap.parallel.collectives import ProcessGroup, reduce_in_place
from megatron_wrap.parallel.state import tensor_parallel_group

_ID_SET_BYTES = 40  # for each id of a set: its place, its copies, its logit, masks


def token_log_probs(logits: Tensor, ids: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Log-probability of each id, fp32 (float64 for float64 logits).

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        ids: [B, S], global ids, the same on every tensor-parallel rank. An id outside the vocabulary (such as -100)
            gives a finite number that means nothing: mask it.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        [B, S], equal on every tensor-parallel rank.
    """
    return _TokenLogProbs.apply(logits, ids, group or tensor_parallel_group())


def gather_log_probs(logits: Tensor, id_sets: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Log-probability of each id of a set of K ids a token, fp32 (float64 for float64 logits).

    Args:
        logits: [B, S, V/tp], this rank's columns of the vocabulary.
        id_sets: [B, S, K], global ids, the same on every tensor-parallel rank, in any order; an id may come twice.
            The result of an id outside the vocabulary means nothing.
        group: the tensor-parallel group; default: the current layout's.

    Returns:
        [B, S, K], equal on every tensor-parallel rank.

    Raises:
        FlowError: `id_sets` does not have the tokens of `logits`.
    """
    check_logits("logits", logits, ("id_sets", id_sets))
    return _GatherLogProbs.apply(logits, id_sets, group or tensor_parallel_group())


def vocabulary_max(logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Largest logit of each token over the whole vocabulary: [B, S, V/tp] -> [B, S], equal on every TP rank.

    The gradient goes to the first column (lowest id) that has the maximum.
    """
    return _VocabularyMax.apply(logits, group or tensor_parallel_group())


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, group: ProcessGroup) -> Tensor:
        columns = logits.shape[-1]
        local_ids = ids.long() - group.rank() * columns
        kernels, kept = _kernels(logits), None
        if kernels:
            flat = logits.detach().view(-1, columns)
            parts = kernels.normalizer_parts(flat, local_ids.reshape(-1).contiguous())
            highest, total, picked = (part.view(ids.shape) for part in parts)
        else:
            dtype = compute_dtype(logits)
            if ctx.needs_input_grad[0] and logits.dtype == dtype and logits.nbytes <= CHUNK_BYTES:
                # small enough to stay: they become the gradient, which spares the backward its own
                highest = finite_max(logits, dtype)
                kept = exponentials(logits, highest)
                total = kept.sum(dim=-1)
            else:
                highest, total = normalizer_parts(logits, dtype, limit=CHUNK_BYTES)
            places, owned = owned_places(ids.unsqueeze(-1), columns, group)
            picked = owned_logits(logits, places, owned, dtype).squeeze(-1)
        highest_anywhere = highest.clone()
        reduce_in_place(highest_anywhere, "max", group)
        sums = torch.stack((total * (highest - highest_anywhere).exp(), picked))
        reduce_in_place(sums, "sum", group)
        log_normalizer = highest_anywhere + sums[0].log()
        ctx.save_for_backward(logits, local_ids, highest, log_normalizer)
        ctx.kept = kept
        return sums[1] - log_normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits, local_ids, highest, log_normalizer = ctx.saved_tensors
        grad_out = grad_outputs[0].to(log_normalizer.dtype)
        kernels = _kernels(logits)
        if kernels:
            flat = logits.detach().view(-1, logits.shape[-1])
            rows = (tensor.reshape(-1).contiguous() for tensor in (local_ids, log_normalizer, grad_out))
            return kernels.log_prob_gradient(flat, *rows).view(logits.shape), None, None
        kept, ctx.kept = ctx.kept, None  # a second backward through the same graph makes its own
        factor = (highest - log_normalizer).exp_().mul_(-grad_out)
        if kept is not None:
            return _add_one_hot(kept.mul_(factor.unsqueeze(-1)), local_ids, grad_out), None, None
        return _log_prob_gradient(logits, local_ids, highest, factor, grad_out), None, None


def _kernels(logits: Tensor) -> Any:
    """The Triton kernels where they can run, else None: the torch code is the same, a little slower."""
    if logits.device.type != "cuda" or logits.dtype == torch.float64 or not logits.is_contiguous():
        return None
    if not importlib.util.find_spec("triton"):
        return None
    from megatron_wrap.ops import triton_log_probs

    return triton_log_probs


def _log_prob_gradient(logits: Tensor, local_ids: Tensor, highest: Tensor, factor: Tensor, grad_out: Tensor) -> Tensor:
    """onehot * g - softmax * g, for this rank's columns, where exp(logit - highest) * factor is the second part."""
    grad = torch.empty_like(logits)
    for block in token_blocks(local_ids.shape, logits.shape[-1] * factor.dtype.itemsize, CHUNK_BYTES):
        part = exponentials(logits[block], highest[block]).mul_(factor[block].unsqueeze(-1))
        grad[block] = _add_one_hot(part, local_ids[block], grad_out[block])
        del part  # not held while the next block is made
    return grad


def _add_one_hot(part: Tensor, local_ids: Tensor, values: Tensor) -> Tensor:
    """In place: add each token's value in the column of its id, where this rank has it."""
    columns = part.shape[-1]
    owned = (local_ids >= 0) & (local_ids < columns)
    places = local_ids.clamp(0, columns - 1).unsqueeze(-1)
    return part.scatter_add_(-1, places, values.masked_fill(~owned, 0.0).unsqueeze(-1))


class _GatherLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, id_sets: Tensor, group: ProcessGroup) -> Tensor:
        columns, dtype = logits.shape[-1], compute_dtype(logits)
        normalizer = log_normalizer(logits, dtype, 1.0, group)
        result = torch.empty(id_sets.shape, dtype=dtype, device=logits.device)
        for block in token_blocks(normalizer.shape, id_sets.shape[-1] * _ID_SET_BYTES):
            places, owned = owned_places(id_sets[block], columns, group)
            result[block] = owned_logits(logits[block], places, owned, dtype)
            del places, owned
        reduce_in_place(result, "sum", group)
        ctx.save_for_backward(logits, id_sets, normalizer)
        ctx.group = group
        return result.sub_(normalizer.unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        logits, id_sets, normalizer = ctx.saved_tensors
        columns, dtype = logits.shape[-1], normalizer.dtype
        grad = torch.empty_like(logits)
        token_bytes = columns * dtype.itemsize + id_sets.shape[-1] * _ID_SET_BYTES
        for block in token_blocks(normalizer.shape, token_bytes):
            outer = grad_outputs[0][block].to(dtype)
            places, owned = owned_places(id_sets[block], columns, ctx.group)
            part = exponentials(logits[block], normalizer[block]).mul_(-outer.sum(dim=-1, keepdim=True))
            grad[block] = part.scatter_add_(-1, places, outer.masked_fill(~owned, 0.0))
            del outer, places, owned, part  # not held while the next block is made
        return grad, None, None


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
        outer = torch.where(owned, grad_outputs[0], 0).unsqueeze(-1)
        # on a CPU torch's scatter works on an fp32 copy of half-precision tensors
        for block in token_blocks(index.shape, ctx.shape[-1] * 4, CHUNK_BYTES):
            grad[block].scatter_(-1, index[block].unsqueeze(-1), outer[block])
        return grad, None
