"""The gradient of a load-balancing loss in Triton, from sums over tokens. Import it only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _routing_balance_kernel(
    score_sums,
    counts,
    load,
    gradient,
    total,
    scale,
    coefficient,
    topk,
    sequences,
    experts,
    columns: tl.constexpr,
):
    column = tl.arange(0, columns)
    inside = column < experts
    loss = tl.zeros([columns], dtype=tl.float32)
    for sequence in range(sequences):
        offset = sequence * experts + column
        tokens = tl.sum(tl.load(counts + offset, mask=inside, other=0.0)) / topk
        loads = tl.load(load + offset, mask=inside, other=0.0).to(tl.float32)
        slope = scale * loads / (tl.maximum(tl.sum(loads), 1.0) * tl.maximum(tokens, 1.0))
        loss += slope * tl.load(score_sums + offset, mask=inside, other=0.0)
        tl.store(gradient + offset, coefficient * slope, mask=inside)
    tl.store(total, tl.load(total) + tl.sum(loss))


def balance(
    score_sums: Tensor, counts: Tensor, load: Tensor, topk: int, scale: float, coefficient: float, total: Tensor
) -> Tensor:
    """The gradient of a load-balancing loss, scale * sum over sequences and experts of
    load / (its sum over experts) * score_sums / tokens, where tokens is the sum of the counts over experts / topk.

    Args:
        score_sums: fp32 [sequences, experts], local; sums of the scores over the counted tokens of a sequence.
        counts: fp32 [sequences, experts], of all ranks that share the sequences.
        load: [sequences, experts], assignments of each expert; like the others contiguous, on a GPU.
        total: fp32 scalar to which the loss is added.

    Returns:
        coefficient * the loss's derivative by `score_sums`, fp32 [sequences, experts]; `load` and `counts` are
        constants of the loss (Switch Transformers, arXiv:2101.03961, equation 4).
    """
    sequences, experts = score_sums.shape
    gradient = torch.empty_like(score_sums)
    _routing_balance_kernel[(1,)](
        *(score_sums, counts, load, gradient, total, float(scale), float(coefficient), topk, sequences, experts),
        columns=triton.next_power_of_2(experts),
        num_warps=4,
    )
    return gradient
