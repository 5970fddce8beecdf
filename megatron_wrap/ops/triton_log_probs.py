"""Triton kernels of `log_probs`: forward reads the logits once, backward reads them once and writes the gradient once,
without temporary memory.

Imported only for logits on a GPU. A program processes one token's columns with a running maximum and a rescaled running
sum (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Columns per iteration of a program."""


@triton.jit
def _log_normalizer_kernel(
    logits, ids, highest, total, picked, weighted, columns, block: tl.constexpr, with_entropy: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * columns
    running_max = -float("inf")
    running_sum = 0.0
    running_weighted = 0.0  # sum of exp(value - running_max) * (value - running_max)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        value = tl.load(base + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(running_max, tl.max(value, axis=0))
        safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        rescaled_sum = running_sum * tl.exp(running_max - safe_max)
        power = tl.exp(value - safe_max)
        if with_entropy:  # a term is 0 where its probability is, also for a value of -inf
            moved = tl.where(rescaled_sum > 0.0, rescaled_sum * (running_max - safe_max), 0.0)
            added = tl.sum(tl.where(power > 0.0, power * (value - safe_max), 0.0), axis=0)
            running_weighted = running_weighted * tl.exp(running_max - safe_max) + moved + added
        running_sum = rescaled_sum + tl.sum(power, axis=0)
        running_max = new_max
    local_id = tl.load(ids + row)
    owned = (local_id >= 0) & (local_id < columns)
    tl.store(highest + row, running_max)
    tl.store(total + row, running_sum)
    if with_entropy:
        tl.store(weighted + row, running_weighted)
    tl.store(picked + row, tl.load(base + local_id, mask=owned, other=0.0).to(tl.float32))


@triton.jit
def _log_prob_gradient_kernel(logits, ids, log_normalizer, grad_out, grad, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * block
    column = start + tl.arange(0, block)
    inside = column < columns
    value = tl.load(logits + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32)
    outer = tl.load(grad_out + row)
    share = tl.where(column == tl.load(ids + row), outer, 0.0)
    result = share - outer * tl.exp(value - tl.load(log_normalizer + row))
    tl.store(grad + row * columns + column, result.to(grad.dtype.element_ty), mask=inside)


def normalizer_parts(
    logits: Tensor, local_ids: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Parts of the normalizer for each row of logits [N, V/tp] on a GPU: maximum, sum of exp(logit - maximum), logit of
    the local id (0 if the id is outside this rank's columns), and with `with_entropy` the sum of exp(logit - maximum) *
    (logit - maximum); each [N] in fp32."""
    rows, columns = logits.shape
    numbers = [torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3 + with_entropy)]
    highest, total, picked = numbers[:3]
    weighted = numbers[3] if with_entropy else None
    _log_normalizer_kernel[(rows,)](
        *(logits, local_ids, highest, total, picked, total if weighted is None else weighted, columns),
        block=BLOCK,
        with_entropy=with_entropy,
        num_warps=8,
    )
    return highest, total, picked, weighted


def log_prob_gradient(
    logits: Tensor, local_ids: Tensor, log_normalizer: Tensor, grad_out: Tensor, grad: Tensor | None = None
) -> Tensor:
    """Gradient of the log-probabilities with respect to the logits, [N, V/tp] in their dtype.

    Args:
        grad: tensor to which the gradient is written; may be the logits, of which a program reads each element before
            it writes it.
    """
    rows, columns = logits.shape
    grad = torch.empty_like(logits) if grad is None else grad
    grid = (rows, triton.cdiv(columns, BLOCK))
    _log_prob_gradient_kernel[grid](
        logits, local_ids, log_normalizer, grad_out, grad, columns, block=BLOCK, num_warps=8
    )
    return grad
