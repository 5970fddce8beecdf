"""Definition of a router's selection of experts, and whether the kernel of `routing.py` supports it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, float64

from megatron_wrap.nn.kernels.available import has_triton

MAX_EXPERTS = 1024
"""Maximum number of experts that the kernel supports: it keeps their scores in registers."""


class Selection(NamedTuple):
    """Selection and weighting of experts (megatron/core/transformer/moe/moe_utils.py,
    `topk_routing_with_score_function`)."""

    topk: int
    sigmoid: bool
    """Whether scores are sigmoid(logits), which do not compete; else softmax(logits)."""
    softmax_first: bool
    """Whether weights are the unchanged scores; else the weights of a token add up to 1. Without effect on sigmoid."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of experts, of which a token's are chosen first; 1: all experts are in one."""
    group_topk: int = 1
    """Number of groups that are chosen for a token."""
    group_score_experts: int = 1
    """Number of a group's highest scores that add up to the group's score."""


def can_route(logits: Tensor, selection: Selection) -> bool:
    """Whether the kernel supports these logits [T, experts] on this machine. With groups, the numbers of experts and of
    groups must be powers of two."""
    experts = logits.shape[-1]
    sizes = (experts, selection.groups) if selection.groups > 1 else ()
    fits = experts <= MAX_EXPERTS and all(size & (size - 1) == 0 for size in sizes)
    return logits.is_cuda and logits.dtype != float64 and fits and has_triton()
