"""The choice of experts and their weights in Triton, one kernel in each direction: scores, top-k, normalization, and
the scores of the balance losses. Import it only where Triton is installed.

A program has some tokens with the scores of all experts in registers. Arithmetic is in fp32; of equal scores the expert
with the lower number is chosen first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.nn.kernels.expert_selection import Selection

_BLOCK_ELEMENTS = 2048


@triton.jit
def _largest(values, available, number, count: tl.constexpr, most: tl.constexpr):
    # The `count` largest of the available values of each row, as a mask; NaN counts as the largest, so that a token
    # always has its number of experts.
    values = tl.where(values != values, float("inf"), values)
    chosen = available & (number < 0)
    for _ in range(count):
        free = available & (chosen == 0)
        best = tl.max(tl.where(free, values, float("-inf")), axis=1)
        first = tl.min(tl.where(free & (values == best[:, None]), number, most), axis=1)
        chosen = chosen | (number == first[:, None])
    return chosen


@triton.jit
def _within_best_groups(
    values,
    rows: tl.constexpr,
    experts: tl.constexpr,
    groups: tl.constexpr,
    group_topk: tl.constexpr,
    score_experts: tl.constexpr,
):
    # -inf for the experts outside of the `group_topk` groups of the highest scores
    size: tl.constexpr = experts // groups
    within = tl.reshape(values, [rows * groups, size])
    number = tl.arange(0, size)[None, :] + tl.zeros([rows * groups, size], dtype=tl.int32)
    best = _largest(within, number >= 0, number, score_experts, size)
    scores = tl.reshape(tl.sum(tl.where(best, within, 0.0), axis=1), [rows, groups])
    group = tl.arange(0, groups)[None, :] + tl.zeros([rows, groups], dtype=tl.int32)
    allowed = _largest(scores, group >= 0, group, group_topk, groups)
    allowed = tl.reshape(allowed.to(tl.int32), [rows * groups, 1]) + tl.zeros([rows * groups, size], dtype=tl.int32)
    return tl.where(tl.reshape(allowed, [rows, experts]) > 0, values, float("-inf"))


@triton.jit
def _load(logits, tokens, experts, rows: tl.constexpr, columns: tl.constexpr):
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    number = tl.arange(0, columns)[None, :] + tl.zeros([rows, columns], dtype=tl.int32)
    is_expert = number < experts
    inside = (token < tokens)[:, None] & is_expert
    offset = token[:, None].to(tl.int64) * experts + number
    values = tl.load(logits + offset, mask=inside, other=0.0).to(tl.float32)
    return offset, inside, number, is_expert, values


@triton.jit
def _softmax(values, available):
    highest = tl.max(tl.where(available, values, float("-inf")), axis=1)
    powers = tl.where(available, tl.exp(values - highest[:, None]), 0.0)
    return powers / tl.sum(powers, axis=1)[:, None]


@triton.jit
def _forward_kernel(
    logits,
    bias,
    weights,
    mask,
    balance_scores,
    balance_mask,
    tokens,
    experts,
    scale,
    topk: tl.constexpr,
    sigmoid: tl.constexpr,
    softmax_first: tl.constexpr,
    has_bias: tl.constexpr,
    groups: tl.constexpr,
    group_topk: tl.constexpr,
    score_experts: tl.constexpr,
    balances: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    offset, inside, number, is_expert, values = _load(logits, tokens, experts, rows, columns)
    if sigmoid:
        scores = tl.where(is_expert, tl.sigmoid(values), 0.0)
    elif softmax_first or balances:
        scores = _softmax(values, is_expert)
    else:
        scores = values
    ranked = scores if sigmoid or softmax_first else values
    if has_bias:
        ranked += tl.load(bias + number, mask=is_expert, other=0.0).to(tl.float32)
    if groups > 1:
        ranked = _within_best_groups(ranked, rows, columns, groups, group_topk, score_experts)
    chosen = _largest(ranked, is_expert, number, topk, columns)
    if sigmoid:
        result = tl.where(chosen, scores, 0.0)
        if topk > 1:
            result = result / (tl.sum(result, axis=1) + 1e-20)[:, None]
    elif softmax_first:
        result = tl.where(chosen, scores, 0.0)
    else:
        result = _softmax(values, chosen)
    tl.store(weights + offset, (result * scale).to(weights.dtype.element_ty), mask=inside)
    tl.store(mask + offset, chosen.to(tl.int8), mask=inside)
    if balances:
        if sigmoid:
            scores = scores / (tl.sum(scores, axis=1) + 1e-20)[:, None]
        tl.store(balance_scores + offset, scores, mask=inside)
        if has_bias or groups > 1:
            best = _largest(scores, is_expert, number, topk, columns)
            tl.store(balance_mask + offset, best.to(tl.int8), mask=inside)


@triton.jit
def _backward_kernel(
    logits,
    mask,
    grad_weights,
    grad_scores,
    grad_scores_row,
    grad_scores_column,
    grad_logits,
    tokens,
    experts,
    scale,
    topk: tl.constexpr,
    sigmoid: tl.constexpr,
    softmax_first: tl.constexpr,
    balances: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    offset, inside, number, is_expert, values = _load(logits, tokens, experts, rows, columns)
    chosen = tl.load(mask + offset, mask=inside, other=0) != 0
    outer = tl.load(grad_weights + offset, mask=inside, other=0.0).to(tl.float32) * scale
    outer = tl.where(chosen, outer, 0.0)
    if sigmoid:
        scores = tl.where(is_expert, tl.sigmoid(values), 0.0)
        of_scores = outer
        if topk > 1:
            total = tl.sum(tl.where(chosen, scores, 0.0), axis=1) + 1e-20
            mean = tl.sum(outer * scores, axis=1) / total
            of_scores = tl.where(chosen, (outer - mean[:, None]) / total[:, None], 0.0)
    else:
        scores = _softmax(values, is_expert)
        if softmax_first:
            result = scores * (outer - tl.sum(outer * scores, axis=1)[:, None])
        else:
            # outside of the tokens nothing is chosen, and the maximum of nothing would give NaN, which is not stored
            weights = _softmax(values, chosen)
            result = weights * (outer - tl.sum(outer * weights, axis=1)[:, None])
    if balances:
        token = tl.program_id(0) * rows + tl.arange(0, rows)
        position = token[:, None].to(tl.int64) * grad_scores_row + number * grad_scores_column
        inner = tl.load(grad_scores + position, mask=inside, other=0.0).to(tl.float32)
        if sigmoid:
            total = tl.sum(scores, axis=1) + 1e-20
            mean = tl.sum(inner * scores, axis=1) / total
            of_scores += (inner - mean[:, None]) / total[:, None]
        else:
            result += scores * (inner - tl.sum(inner * scores, axis=1)[:, None])
    if sigmoid:
        result = of_scores * scores * (1.0 - scores)
    tl.store(grad_logits + offset, result.to(grad_logits.dtype.element_ty), mask=inside)


@triton.jit
def _split_kernel(values, parts, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    rest = tl.load(values + row * columns + column, mask=inside, other=0.0)
    for number in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(parts + (3 * row + number) * columns + column, part, mask=inside)
        rest -= part.to(tl.float32)


def split(values: Tensor) -> Tensor:
    """bf16 [N, 3 * columns] of fp32 [N, columns] on a GPU: three tensors side by side, whose sum they are."""
    rows, columns = values.shape
    parts = torch.empty(rows, 3 * columns, dtype=torch.bfloat16, device=values.device)
    if rows:
        block = triton.next_power_of_2(columns)
        _split_kernel[(rows,)](values.contiguous(), parts, columns, block=block, num_warps=1)
    return parts


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, selection: Selection, balances: bool) -> Any:
        logits = logits.contiguous()
        tokens, experts = logits.shape
        weights, mask = torch.empty_like(logits), torch.empty(logits.shape, dtype=torch.int8, device=logits.device)
        scores = torch.empty(logits.shape if balances else (0,), dtype=torch.float32, device=logits.device)
        differs = balances and (bias is not None or selection.groups > 1)
        balance_mask = torch.empty_like(mask) if differs else mask
        if logits.numel():
            form = {
                **_form(selection, balances),
                **{"has_bias": bias is not None, "groups": selection.groups, "group_topk": selection.group_topk},
                "score_experts": selection.group_score_experts,
            }
            _forward_kernel[_grid(logits)](
                *(logits, logits if bias is None else bias, weights, mask, scores, balance_mask, tokens, experts),
                **form,
                **_launch(experts),
            )
        ctx.selection, ctx.balances = selection, balances
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, mask)
        chosen, best = mask.view(torch.bool), balance_mask.view(torch.bool)
        ctx.mark_non_differentiable(chosen, best)
        return weights, chosen, scores, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, mask = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        if logits.numel():
            of_weights = torch.zeros_like(logits) if grads[0] is None else grads[0].contiguous()
            balances = ctx.balances and grads[2] is not None
            of_scores = grads[2] if balances else of_weights
            strides = of_scores.stride() if balances else (0, 0)  # the sum over tokens expands one row
            _backward_kernel[_grid(logits)](
                *(logits, mask, of_weights, of_scores, *strides, grad_logits, *logits.shape),
                **_form(ctx.selection, balances),
                **_launch(logits.shape[1]),
            )
        return grad_logits, None, None, None


def _form(selection: Selection, balances: bool) -> dict[str, Any]:
    return {
        **{"scale": float(selection.scale), "topk": selection.topk, "sigmoid": selection.sigmoid},
        **{"softmax_first": selection.softmax_first, "balances": balances},
    }


def _launch(experts: int) -> dict[str, int]:
    columns = triton.next_power_of_2(experts)
    return {"rows": max(1, _BLOCK_ELEMENTS // columns), "columns": columns, "num_warps": 4}


def _grid(logits: Tensor) -> tuple[int]:
    return (triton.cdiv(logits.shape[0], _launch(logits.shape[1])["rows"]),)


def route(
    logits: Tensor, selection: Selection, bias: Tensor | None, balances: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The experts of each token and their weights.

    Args:
        logits: [T, experts] on a GPU, in any floating dtype but float64.
        selection: one that `can_route` accepts.
        bias: fp32 [experts], added to the scores for the selection alone; only with sigmoid.
        balances: also return what balance losses need.

    Returns:
        The weights [T, experts] in the dtype of the logits, 0 where an expert is not chosen, and bool [T, experts],
        whether it is; fp32 [T, experts] scores that add up to 1, and bool [T, experts], the experts of the highest
        scores without bias and groups: of these two only the second has a meaning if not `balances`.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _Route.apply(logits, bias, selection, balances)
    return result
