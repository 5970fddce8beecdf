"""The router's kernels by Megatron-Core's functions, with which the router's path with kernels runs on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def documented_kernels() -> Iterator[list[Any]]:
    """Routers route as if their kernels ran here. Yields the selection of each pass."""
    from megatron_wrap.nn.experts import router

    calls: list[Any] = []

    def route(logits: Tensor, selection: Any, *arguments: Any, **named: Any) -> SimpleNamespace:
        calls.append(selection)
        return _route(logits, selection, *arguments, **named)

    modules = {"megatron_wrap.nn.kernels.router": SimpleNamespace(route=route, balance=_balance)}
    with patch.dict(sys.modules, modules), patch.object(router, "can_route", lambda *_: True):
        yield calls


def _route(
    logits: Tensor,
    selection: Any,
    bias: Tensor | None,
    padding: Tensor | None,
    *,
    sequences: int,
    balances: bool,
    counts: bool,
) -> SimpleNamespace:
    """`nn/kernels/router.py`."""
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        topk_routing_with_score_function,
    )

    from megatron_wrap.nn.experts.expert_choice import ExpertChoice

    score = "sigmoid" if selection.sigmoid else "softmax"
    grouped = selection.groups > 1
    groups = (selection.groups, selection.group_topk) if grouped else (None, None)
    choice = ExpertChoice(selection.group_score_experts if grouped else None)
    weights, chosen = topk_routing_with_score_function(
        *(logits, selection.topk, selection.softmax_first, *groups, selection.scale, score, bias), router_replay=choice
    )
    kept = torch.ones(len(logits), 1) if padding is None else (~padding).reshape(-1, 1).float()

    def over_tokens(values: Tensor) -> Tensor:
        return (values * kept).view(-1, sequences, values.shape[-1]).sum(dim=0)

    result = SimpleNamespace(weights=weights, chosen=chosen, score_sums=None, best_counts=None, chosen_counts=None)
    if balances:
        best, scores = compute_routing_scores_for_aux_loss(logits, selection.topk, score)
        result.score_sums, result.best_counts = over_tokens(scores), over_tokens(best)
    if counts:
        result.chosen_counts = over_tokens(chosen)
    return result


def _balance(
    score_sums: Tensor, counts: Tensor, load: Tensor, topk: int, scale: float, coefficient: float, total: Tensor
) -> Tensor:
    """`nn/kernels/router.py`."""
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    values, experts = score_sums.clone().requires_grad_(), score_sums.shape[1]
    assigned = counts.sum(dim=1)
    loads = load / load.sum(dim=1, keepdim=True) * assigned[:, None]
    with torch.enable_grad():
        losses = [
            switch_load_balancing_loss_func(row[None], of_load, count / topk, topk, experts, scale / experts)
            for row, of_load, count in zip(values, loads, assigned, strict=True)
        ]
        loss = torch.stack(losses).sum()
    total.add_(loss.detach())
    return coefficient * torch.autograd.grad(loss, values)[0]
