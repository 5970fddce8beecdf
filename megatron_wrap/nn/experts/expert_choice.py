"""Selection of experts in a router: those of highest score, or those that were recorded."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class ExpertChoice:
    """Selects the top-k experts of each token. It has the interface of Megatron-Core's `RouterReplay`, the hook of
    `topk_routing_with_score_function` for a different selection. Unlike there, a layer that is computed again in the
    backward pass replays the selection of its own micro-batch, on every pipeline schedule.

    Args:
        group_score_experts: see `Router`.
    """

    def __init__(self, group_score_experts: int | None = None) -> None:
        self._group_score_experts = group_score_experts
        self._in_pass = False
        self._replayed: Tensor | None = None
        self._records = False
        self._of_backward: deque[Tensor | None] = deque()
        self.recorded: Tensor | None = None
        """Experts selected in the last pass that recorded, int64 [tokens, topk]; None: there was none."""

    @property
    def is_in_use(self) -> bool:
        """Whether a selection may be recorded, or differ from that of the highest scores."""
        return self._in_pass or bool(self._of_backward)

    def begin_pass(self, replayed: Tensor | None, records: bool) -> None:
        """Begin the forward pass of a micro-batch.

        Args:
            replayed: integers [tokens, topk], the experts to select; the experts of a token with a negative one are
                selected by its scores.
            records: keep the selection as `recorded`.
        """
        self._in_pass, self._replayed, self._records = True, replayed, records
        if torch.is_grad_enabled():
            self._of_backward.append(replayed)

    def end_pass(self) -> None:
        """End the forward pass. Until the next one begins, selections are for layers that are computed again in the
        backward pass, which takes the micro-batches in the order of their forward passes."""
        self._in_pass, self._replayed, self._records = False, None, False

    def forget(self) -> None:
        """Drop the recorded selection and those kept for backward passes."""
        self._of_backward.clear()
        self.recorded = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores, indices) of the selected experts, both [tokens, topk], from scores [tokens, experts]; the gradient
        flows through these scores."""
        replayed = self._replayed
        if not self._in_pass and self._of_backward:
            replayed = self._of_backward.popleft()
        if self._group_score_experts is None:
            values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            values, indices = self._of_best_groups(scores, topk, num_groups, group_topk, self._group_score_experts)
        if replayed is not None:
            is_recorded = (replayed >= 0).all(dim=-1, keepdim=True)
            indices = torch.where(is_recorded, replayed.to(indices.dtype), indices)
            values = scores.gather(-1, indices)
        if self._records:
            self.recorded = indices.detach()
        return values, indices

    @staticmethod
    def _of_best_groups(
        scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, score_experts: int
    ) -> tuple[Tensor, Tensor]:
        assert num_groups is not None
        assert group_topk is not None
        by_group = scores.unflatten(-1, (num_groups, -1))
        group_scores = by_group.topk(score_experts, dim=-1).values.sum(dim=-1)
        groups = group_scores.topk(group_topk, dim=-1).indices
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, groups, True)
        values, indices = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(-2).topk(topk, dim=-1)
        return values, indices
