"""Assignment of tokens to rows of the experts' input, and the movement of rows in both directions.

On a GPU everything is computed there, in a number of kernels that does not depend on the number of experts, and nothing
waits for it. No two values are added to one element in an order that varies, so two runs give equal bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_wrap.nn.kernels.available import has_triton


class RowOrder(NamedTuple):
    """Rows of T tokens for G groups, such as experts or processes, sorted by group, then by token."""

    rows: Tensor
    """Rows of each token in the order of their groups, then -1, int64 [T, width]."""
    totals: Tensor
    """1 + the index of each group's last row, its number of rows, and its number of members, int32 [3, G]."""

    @property
    def ends(self) -> Tensor:
        """1 + the index of each group's last row, int32 [G]."""
        return self.totals[0]


def row_order(members: Tensor, groups: int, width: int) -> RowOrder:
    """The order of rows by group, then by token.

    Args:
        members: [T, G * n], bool or the weights of members: a token has a row in a group if at least one of the group's
            n values is true, or not negative.
        groups: G.
        width: largest number of rows of a token.
    """
    if members.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.expert_rows import order_rows

        return RowOrder(*order_rows(members, groups, width))
    if members.is_floating_point():
        members = ~(members < 0)  # NaN is a member's weight, so that the loss is refused
    by_group = members.unflatten(1, (groups, members.shape[1] // groups))
    mask = by_group.any(dim=2)
    group, token = mask.t().nonzero(as_tuple=True)
    rows = token.new_full((len(mask), width), -1)
    rows[token, (mask.cumsum(1) - 1)[token, group]] = torch.arange(len(token), device=mask.device)
    counts = mask.sum(0)
    return RowOrder(rows, torch.stack([counts.cumsum(0), counts, by_group.sum((0, 2))]).to(torch.int32))


def rows_of_tokens(
    tokens: Tensor, weights: Tensor, order: RowOrder, total: int | None, members: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rows [R, H] of tokens [T, H], and the weights [R, n] of each row's group.

    Args:
        weights: [T, G * n].
        total: the number of rows (R). None: the host does not know it; on a GPU undefined rows follow, up to the most
            that there can be.
        members: bool [T, G * n]: a row's weight is -1 where it is false. None: n is 1, and the rows' weights are [R].
    """
    result: tuple[Tensor, Tensor] = _Spread.apply(tokens, weights, members, *order, total)
    return result


def sums_of_rows(rows: Tensor, order: RowOrder) -> Tensor:
    """Sum of each token's rows: [R, H] -> [T, H]."""
    result: Tensor = _Sum.apply(rows, order.rows)
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        members: Tensor | None,
        rows: Tensor,
        totals: Tensor,
        total: int | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(members, rows, totals)
        of_rows = _spread_with_weights(tokens, weights, members, rows, totals, total)
        return of_rows if members is not None else (of_rows[0], of_rows[1].view(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        members, rows, totals = ctx.saved_tensors
        of_weights = grads[1].view(-1, 1) if members is None else grads[1]
        return *_sum_with_weights(grads[0], of_weights, members, rows, totals), None, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(rows_of_token)
        ctx.total = rows.shape[0]
        return _sum_rows(rows, rows_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows_of_token,) = ctx.saved_tensors
        return _spread_rows(grads[0], rows_of_token, ctx.total), None


def _spread_with_weights(
    tokens: Tensor, weights: Tensor, members: Tensor | None, rows: Tensor, totals: Tensor, total: int | None
) -> tuple[Tensor, Tensor]:
    """The rows [R, H] of tokens [T, H], and their weights [R, n] of [T, G * n]."""
    groups = totals.shape[1]
    if tokens.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.expert_rows import spread_with_weights

        members, total = None if members is None else members.contiguous(), rows.numel() if total is None else total
        return spread_with_weights(tokens.contiguous(), weights.contiguous(), members, rows, totals, groups, total)
    total = int(totals[0, -1]) if total is None else total
    if members is not None:
        weights = weights.masked_fill(~members, -1.0)
    token = _token_of_row(rows, total)
    by_group = weights.unflatten(1, (groups, weights.shape[1] // groups))
    return tokens.index_select(0, token), by_group[token, _group_of_row(totals, total)]


def _sum_with_weights(
    of_rows: Tensor, of_weights: Tensor, members: Tensor | None, rows: Tensor, totals: Tensor
) -> tuple[Tensor, Tensor]:
    """The adjoint of `_spread_with_weights`: [R, H] and [R, n] -> [T, H] and [T, G * n]."""
    total, groups = of_rows.shape[0], totals.shape[1]
    if of_rows.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.expert_rows import sum_with_weights

        members = None if members is None else members.contiguous()
        return sum_with_weights(of_rows.contiguous(), of_weights.contiguous(), members, rows, totals, groups)
    of_all = of_weights.new_zeros((rows.shape[0], groups, of_weights.shape[1]))
    of_all[_token_of_row(rows, total), _group_of_row(totals, total)] = of_weights  # a cell has one row
    of_all = of_all.flatten(1)
    return _sum_rows(of_rows, rows), of_all if members is None else of_all.masked_fill(~members, 0.0)


def _token_of_row(rows: Tensor, total: int) -> Tensor:
    """Token of each row, int64 [total], from the rows of each token."""
    is_row = rows >= 0
    result = rows.new_empty(total)
    result[rows[is_row]] = is_row.nonzero()[:, 0]
    return result


def _group_of_row(totals: Tensor, total: int) -> Tensor:
    """Group of each row, int64 [total]."""
    return torch.searchsorted(totals[0], torch.arange(total, dtype=totals.dtype, device=totals.device), right=True)


def _spread_rows(tokens: Tensor, rows: Tensor, total: int) -> Tensor:
    """The rows [R, H] of tokens [T, H]."""
    if tokens.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.expert_rows import spread_rows

        return spread_rows(tokens.contiguous(), rows, total)
    return tokens.index_select(0, _token_of_row(rows, total))


def _sum_rows(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    """Sums [T, H] of the rows [R, H] with the indices [T, width], in the order of the indices; -1 adds nothing."""
    if rows.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.expert_rows import sum_rows

        return sum_rows(rows.contiguous(), rows_of_token)
    with_zeros = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
    return with_zeros[rows_of_token].sum(1)
