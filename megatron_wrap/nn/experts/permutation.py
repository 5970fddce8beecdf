"""Which row of the experts' input is which token, and the movement of rows in both directions.

Everything is computed on the tokens' device, in a number of operations that does not depend on the number of experts,
and nothing waits for a GPU. No two values are added to one element in an order that varies, so two runs give equal
bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_wrap.nn.kernels.available import has_triton


class RowOrder(NamedTuple):
    """Rows of T tokens for G groups, such as experts or processes, sorted by group, then by token."""

    tokens: Tensor
    """int64 [R]: the token of each row."""
    cells: Tensor
    """int64 [R]: the token of each row times G, plus its group."""
    rows: Tensor
    """int64 [T, width]: the rows of each token, in the order of their groups; then -1."""
    ends: Tensor
    """int32 [G]: 1 + the index of each group's last row."""

    def weights_of_rows(self, weights: Tensor) -> Tensor:
        """[R, ...]: of the weights [T, G, ...], those of each row's token and group."""
        result: Tensor = _Chosen.apply(weights, self.cells)
        return result


def row_order(mask: Tensor, width: int, total: int | None = None) -> RowOrder:
    """The order of rows.

    Args:
        mask: bool [T, G]: whether a token has a row in a group.
        width: largest number of rows of a token.
        total: the number of rows (R); None: every token has `width`.
    """
    tokens, groups = mask.shape
    most = tokens * width
    size = most if total is None else total
    if mask.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.row_order import order_rows

        of_rows, cells, rows, ends = order_rows(mask, width)
        return RowOrder(of_rows[:size], cells[:size], rows, ends)
    by_group = mask.t().contiguous()
    slots = torch.where(by_group, by_group.flatten().cumsum(0).view(groups, tokens) - 1, most)
    numbers = torch.arange(tokens, device=mask.device)
    # values without a row fall on the last element, which is cut off
    indices = torch.arange(tokens * groups, device=mask.device).view(tokens, groups).t().flatten()
    cells = numbers.new_zeros(most + 1).scatter_(0, slots.flatten(), indices)[:size]
    ranks = torch.where(mask, mask.cumsum(1) - 1 + numbers[:, None] * width, most)
    rows = slots.new_full((most + 1,), -1).scatter_(0, ranks.flatten(), slots.t().flatten())
    ends = mask.sum(0).cumsum(0).to(torch.int32)
    return RowOrder(cells // groups, cells, rows[:most].view(tokens, width), ends)


def rows_of_tokens(tokens: Tensor, order: RowOrder) -> Tensor:
    """The rows [R, H] of tokens [T, H]."""
    result: Tensor = _Spread.apply(tokens, order.tokens, order.rows)
    return result


def sums_of_rows(rows: Tensor, order: RowOrder) -> Tensor:
    """[T, H]: the sum of each token's rows, of [R, H]."""
    result: Tensor = _Sum.apply(rows, order.tokens, order.rows)
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(rows_of_token)
        return _spread_rows(tokens, token_of_row, rows_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows_of_token,) = ctx.saved_tensors
        return _sum_rows(grads[0], rows_of_token), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row, rows_of_token)
        return _sum_rows(rows, rows_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        token_of_row, rows_of_token = ctx.saved_tensors
        return _spread_rows(grads[0], token_of_row, rows_of_token), None, None


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(cells)
        ctx.shape = weights.shape
        return weights.flatten(0, 1).index_select(0, cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (cells,) = ctx.saved_tensors
        of_all = grads[0].new_zeros(ctx.shape)
        of_all.flatten(0, 1).index_copy_(0, cells, grads[0])  # a cell has one row
        return of_all, None


def _spread_rows(tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
    """The rows [R, H] of tokens [T, H]."""
    if tokens.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.expert_rows import spread_rows

        return spread_rows(tokens.contiguous(), rows_of_token, token_of_row.shape[0])
    return tokens.index_select(0, token_of_row)


def _sum_rows(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    """[T, H]: sums of the rows [R, H] with the indices [T, width], in the order of the indices; -1 adds nothing."""
    if rows.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.expert_rows import sum_rows

        return sum_rows(rows.contiguous(), rows_of_token)
    with_zeros = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
    return with_zeros[rows_of_token].sum(1)
