"""Which row of the experts' input is which token, and the movement of rows in both directions.

Everything is computed on the tokens' device, in a number of operations that does not depend on the number of experts,
and nothing waits for a GPU. Gradients are gathers too, so two runs give equal bits.
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
    rows: Tensor
    """int64 [T, width]: the rows of each token, in the order of their groups; then -1."""
    slots: Tensor
    """int64 [G, T]: the row of a token in a group; at least R where it has none."""

    def weights_of_rows(self, weights: Tensor) -> Tensor:
        """[R]: of the weights [T, G], that of each row's token and group."""
        size = self.tokens.shape[0]
        slots = self.slots.clamp(max=size)
        return weights.new_zeros(size + 1).scatter(0, slots.flatten(), weights.t().flatten())[:size]


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
    by_group = mask.t().contiguous()
    slots = torch.where(by_group, by_group.flatten().cumsum(0).view(groups, tokens) - 1, most)
    numbers = torch.arange(tokens, device=mask.device)
    # values without a row fall on the last element, which is cut off
    of_rows = numbers.new_empty(most + 1).scatter_(0, slots.flatten(), numbers.repeat(groups))
    ranks = torch.where(mask, mask.cumsum(1) - 1 + numbers[:, None] * width, most)
    rows = slots.new_full((most + 1,), -1).scatter_(0, ranks.flatten(), slots.t().flatten())
    return RowOrder(of_rows[:size], rows[:most].view(tokens, width), slots)


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
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows_of_token,) = ctx.saved_tensors
        return _sum_rows(grads[0], rows_of_token), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return _sum_rows(rows, rows_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return grads[0].index_select(0, token_of_row), None, None


def _sum_rows(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    """[T, H]: sums of the rows [R, H] with the indices [T, width], in the order of the indices; -1 adds nothing."""
    if rows.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.sum_rows import sum_rows

        return sum_rows(rows.contiguous(), rows_of_token)
    with_zeros = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
    return with_zeros[rows_of_token].sum(1)
