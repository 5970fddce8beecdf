"""The router in Triton: the choice of experts and their weights, the gradient of load-balancing losses, and fp32 values
as sums of bf16 values. Import it only where Triton is installed.

One kernel in each direction computes scores, top-k, normalization, and the sums over tokens that balance losses need. A
program holds some tokens of a sequence with the scores of all experts in registers, and writes its part of the sums.
Arithmetic is in fp32; of equal scores the expert with the lower number is chosen first."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.nn.kernels.available import Selection

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
def _tokens(rows: tl.constexpr):
    # Indices of a program's tokens, all of one sequence; the tokens of all sequences alternate
    return (tl.program_id(0) * rows + tl.arange(0, rows)) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def _counted(padding, stride, batch_stride, batch, tokens, has_padding: tl.constexpr, rows: tl.constexpr):
    # Whether balance losses count a token, [rows]
    token = _tokens(rows)
    counted = token < tokens
    if has_padding:
        offset = (token // batch).to(tl.int64) * stride + (token % batch) * batch_stride
        counted = counted & (tl.load(padding + offset, mask=counted, other=0) == 0)
    return counted


@triton.jit
def _load(logits, tokens, experts, rows: tl.constexpr, columns: tl.constexpr):
    token = _tokens(rows)
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
def _store_sums(sums, part, parts: tl.constexpr, values, counted, experts, columns: tl.constexpr):
    # Stores the sums over a program's counted rows; sums: [programs of a sequence, parts, sequences, experts]
    total = tl.sum(tl.where(counted[:, None], values, 0.0), axis=0)
    row = (tl.program_id(0).to(tl.int64) * parts + part) * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, columns)
    tl.store(sums + row * experts + column, total, mask=column < experts)


@triton.jit
def _routing_kernel(
    logits,
    bias,
    padding,
    padding_stride,
    padding_batch_stride,
    batch,
    weights,
    mask,
    sums,
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
    has_padding: tl.constexpr,
    balances: tl.constexpr,
    counts: tl.constexpr,
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
    counted = _counted(padding, padding_stride, padding_batch_stride, batch, tokens, has_padding, rows)
    if balances:
        if sigmoid:
            scores = scores / (tl.sum(scores, axis=1) + 1e-20)[:, None]
        best = chosen
        if has_bias or groups > 1:
            best = _largest(scores, is_expert, number, topk, columns)
        _store_sums(sums, 0, 2 + counts, scores, counted, experts, columns)
        _store_sums(sums, 1, 2 + counts, best.to(tl.float32), counted, experts, columns)
    if counts:
        _store_sums(sums, 2 * balances, 2 * balances + 1, chosen.to(tl.float32), counted, experts, columns)


@triton.jit
def _routing_backward_kernel(
    logits,
    mask,
    padding,
    padding_stride,
    padding_batch_stride,
    batch,
    grad_weights,
    grad_sums,
    grad_sums_stride,
    grad_sums_expert_stride,
    grad_logits,
    tokens,
    experts,
    scale,
    topk: tl.constexpr,
    sigmoid: tl.constexpr,
    softmax_first: tl.constexpr,
    has_padding: tl.constexpr,
    balances: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    offset, inside, _number, is_expert, values = _load(logits, tokens, experts, rows, columns)
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
        counted = _counted(padding, padding_stride, padding_batch_stride, batch, tokens, has_padding, rows)
        column = tl.arange(0, columns)
        position = tl.program_id(1) * grad_sums_stride + column * grad_sums_expert_stride
        of_sums = tl.load(grad_sums + position, mask=column < experts, other=0.0)
        inner = tl.where(counted[:, None], of_sums[None, :], 0.0)
        if sigmoid:
            total = tl.sum(scores, axis=1) + 1e-20
            mean = tl.sum(inner * scores, axis=1) / total
            of_scores += (inner - mean[:, None]) / total[:, None]
        else:
            result += scores * (inner - tl.sum(inner * scores, axis=1)[:, None])
    if sigmoid:
        result = of_scores * scores * (1.0 - scores)
    tl.store(grad_logits + offset, result.to(grad_logits.dtype.element_ty), mask=inside)


class Routing(NamedTuple):
    """The experts of T tokens of some sequences."""

    weights: Tensor
    """Weights of the experts, [T, experts] in the dtype of the logits; 0 where an expert is not chosen."""
    chosen: Tensor
    """Mask of the chosen experts, bool [T, experts]."""
    score_sums: Tensor | None
    """Sums of the scores, which add up to 1 for each token, fp32 [sequences, experts] with gradient; None: not
    requested."""
    best_counts: Tensor | None
    """Tokens for which an expert has one of the highest scores, without bias and groups, fp32 [sequences, experts];
    None: not requested."""
    chosen_counts: Tensor | None
    """Tokens of each expert, fp32 [sequences, experts]; None: not requested. All sums and counts are without
    padding."""


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        padding: Tensor | None,
        selection: Selection,
        sequences: int,
        balances: bool,
        counts: bool,
    ) -> Any:
        logits = logits.contiguous()
        experts = logits.shape[1]
        weights, mask = torch.empty_like(logits), torch.empty(logits.shape, dtype=torch.int8, device=logits.device)
        grid, parts = _grid(logits, sequences), 2 * balances + counts
        sums = torch.empty((grid[0], parts, sequences, experts), dtype=torch.float32, device=logits.device)
        if logits.numel():
            form = {
                **_form(selection, padding, balances),
                **{"has_bias": bias is not None, "groups": selection.groups, "group_topk": selection.group_topk},
                **{"score_experts": selection.group_score_experts, "counts": counts},
            }
            _routing_kernel[grid](
                *(logits, logits if bias is None else bias, *_positions(padding, logits)),
                *(weights, mask, sums, *logits.shape),
                **form,
                **_launch(experts),
            )
        ctx.selection, ctx.sequences = selection, sequences
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, mask, padding)
        chosen = mask.view(torch.bool)
        if not parts:
            ctx.mark_non_differentiable(chosen)
            return weights, chosen, None, None, None
        totals = sums.sum(dim=0).unbind()
        of_scores, of_best = totals[:2] if balances else (None, None)
        of_chosen = totals[-1] if counts else None
        ctx.mark_non_differentiable(chosen, *(each for each in (of_best, of_chosen) if each is not None))
        return weights, chosen, of_scores, of_best, of_chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        logits, mask, padding = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        if logits.numel():
            of_weights = torch.zeros_like(logits) if grads[0] is None else grads[0].contiguous()
            balances = grads[2] is not None
            of_sums = grads[2] if balances else of_weights
            _routing_backward_kernel[_grid(logits, ctx.sequences)](
                *(logits, mask, *_positions(padding, logits), of_weights, of_sums, *of_sums.stride()),
                *(grad_logits, *logits.shape),
                **_form(ctx.selection, padding, balances),
                **_launch(logits.shape[1]),
            )
        return grad_logits, None, None, None, None, None, None


def _form(selection: Selection, padding: Tensor | None, balances: bool) -> dict[str, Any]:
    return {
        **{"scale": float(selection.scale), "topk": selection.topk, "sigmoid": selection.sigmoid},
        **{"softmax_first": selection.softmax_first, "has_padding": padding is not None, "balances": balances},
    }


def _positions(padding: Tensor | None, logits: Tensor) -> tuple[Tensor, int, int, int]:
    if padding is None:
        return logits, 0, 0, 1
    stride, batch_stride = padding.stride()
    return padding, stride, batch_stride, padding.shape[1]


def _launch(experts: int) -> dict[str, int]:
    columns = triton.next_power_of_2(experts)
    return {"rows": max(1, _BLOCK_ELEMENTS // columns), "columns": columns, "num_warps": 4}


def _grid(logits: Tensor, sequences: int) -> tuple[int, int]:
    length = logits.shape[0] // sequences
    return triton.cdiv(length, _launch(logits.shape[1])["rows"]), sequences


def route(
    logits: Tensor,
    selection: Selection,
    bias: Tensor | None,
    padding: Tensor | None,
    *,
    sequences: int = 1,
    balances: bool = False,
    counts: bool = False,
) -> Routing:
    """The experts of each token and their weights.

    Args:
        logits: [T, experts] on a GPU, in any floating dtype but float64.
        selection: one that `can_route` accepts.
        bias: fp32 [experts], added to the scores for the selection alone; only with sigmoid.
        padding: bool [S, B] of T = S * B tokens with any strides, True for tokens without effect on sums and counts;
            None: there are none.
        sequences: B, or 1 for sums over all tokens.
        balances: also return `score_sums` and `best_counts`, which balance losses need.
        counts: also return `chosen_counts`.
    """
    return Routing(*_Route.apply(logits, bias, padding, selection, sequences, balances, counts))


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


@triton.jit
def _split_to_bf16_kernel(values, parts, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    rest = tl.load(values + row * columns + column, mask=inside, other=0.0)
    for number in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(parts + (3 * row + number) * columns + column, part, mask=inside)
        rest -= part.to(tl.float32)


def split(values: Tensor) -> Tensor:
    """Split fp32 values [N, columns] on a GPU into three tensors that add up to them, side by side: bf16 [N, 3 *
    columns]."""
    rows, columns = values.shape
    parts = torch.empty(rows, 3 * columns, dtype=torch.bfloat16, device=values.device)
    if rows:
        block = triton.next_power_of_2(columns)
        _split_to_bf16_kernel[(rows,)](values.contiguous(), parts, columns, block=block, num_warps=1)
    return parts
