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
    """The rows of T tokens that k experts each process, sorted by expert, then by token."""

    tokens: Tensor
    """int64 [T * k]: the token of each row."""
    rows: Tensor
    """int64 [T, k]: the rows of each token, in the order of their experts."""
    slots: Tensor
    """int64 [E, T]: the row of a token at an expert; T * k where the expert does not process it."""

    def weights_of_rows(self, weights: Tensor) -> Tensor:
        """[T * k]: of the weights [T, E], that of each row's token and expert."""
        size = self.tokens.shape[0]
        return weights.new_zeros(size + 1).scatter(0, self.slots.flatten(), weights.t().flatten())[:size]


def row_order(routing_map: Tensor, experts_per_token: int) -> RowOrder:
    """The order of rows from `routing_map` bool [T, E], whose every token has `experts_per_token` experts."""
    tokens, experts = routing_map.shape
    size = tokens * experts_per_token
    by_expert = routing_map.t().contiguous()
    slots = torch.where(by_expert, by_expert.flatten().cumsum(0).view(experts, tokens) - 1, size)
    token_numbers = torch.arange(tokens, device=routing_map.device)
    # values of tokens that an expert does not process fall on the last element, which is cut off
    of_rows = token_numbers.new_empty(size + 1).scatter_(0, slots.flatten(), token_numbers.repeat(experts))
    ranks = routing_map.cumsum(1) - 1 + token_numbers[:, None] * experts_per_token
    ranks = torch.where(routing_map, ranks, size)
    rows = slots.new_empty(size + 1).scatter_(0, ranks.flatten(), slots.t().flatten())
    return RowOrder(of_rows[:size], rows[:size].view(tokens, experts_per_token), slots)


def chunk_order(sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The order that brings chunks of rows, sorted by sender and then by expert, into that by expert, then by sender.

    Args:
        sizes: integers [senders, experts]: rows in each chunk.
        total: their sum.

    Returns:
        The present index of each row in the new order, and the new index of each present row: int64 [total] each.
    """
    by_expert = sizes.t()
    begins = (sizes.flatten().cumsum(0).view(sizes.shape) - sizes).t().flatten()
    lengths = by_expert.flatten()
    new_begins = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(begins - new_begins, lengths, output_size=total)
    numbers = torch.arange(total, device=sizes.device)
    present = numbers + shift
    return present, torch.empty_like(present).scatter_(0, present, numbers)


def rows_of_tokens(tokens: Tensor, order: RowOrder) -> Tensor:
    """The experts' rows [T * k, H] of tokens [T, H]."""
    result: Tensor = _Spread.apply(tokens, order.tokens, order.rows)
    return result


def sums_of_rows(rows: Tensor, order: RowOrder) -> Tensor:
    """[T, H]: the sum of each token's rows [T * k, H]."""
    result: Tensor = _Sum.apply(rows, order.tokens, order.rows)
    return result


def reorder(rows: Tensor, present: Tensor, new: Tensor) -> Tensor:
    """`rows[present]` for a permutation whose inverse is `new`."""
    result: Tensor = _Reorder.apply(rows, present, new)
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


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, present: Tensor, new: Tensor) -> Tensor:
        ctx.save_for_backward(new)
        return rows.index_select(0, present)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (new,) = ctx.saved_tensors
        return grads[0].index_select(0, new), None, None


def _sum_rows(rows: Tensor, rows_of_token: Tensor) -> Tensor:
    """[T, H]: sums of the rows [R, H] with the indices [T, k], in the order of the indices, in fp32."""
    if rows.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.sum_rows import sum_rows

        return sum_rows(rows.contiguous(), rows_of_token)
    return rows.index_select(0, rows_of_token.flatten()).view(*rows_of_token.shape, -1).sum(1)
