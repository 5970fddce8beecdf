"""How a router selects experts, and whether the kernel of `routing.py` does it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, float64

from megatron_wrap.nn.kernels.available import has_triton

MAX_EXPERTS = 1024
"""Whose scores the kernel keeps in registers."""


class Selection(NamedTuple):
    """How experts are selected and weighted (megatron/core/transformer/moe/moe_utils.py,
    `topk_routing_with_score_function`)."""

    topk: int
    sigmoid: bool
    """Scores are sigmoid(logits), which do not compete; else softmax(logits)."""
    softmax_first: bool
    """Weights are scores as they are; else those of a token add up to 1. Without effect on sigmoid."""
    scale: float = 1.0
    """Of the weights."""
    groups: int = 1
    """Groups of experts, of which a token's are chosen first; 1: all experts are in one."""
    group_topk: int = 1
    """Groups of a token."""
    group_score_experts: int = 1
    """Experts whose scores add up to the score of their group."""


def can_route(logits: Tensor, selection: Selection) -> bool:
    """Whether the kernel supports these logits [T, experts] on this machine: groups of a power of two."""
    experts = logits.shape[-1]
    sizes = (experts, selection.groups) if selection.groups > 1 else ()
    fits = experts <= MAX_EXPERTS and all(size & (size - 1) == 0 for size in sizes)
    return logits.is_cuda and logits.dtype != float64 and fits and has_triton()
