"""Linear layers of tensor and sequence parallelism whose communication overlaps with their own matmuls: the input is
multiplied piece by piece as it arrives, and the output sent piece by piece (arXiv:2105.05720, section 2). A transfer is
queued before the matmul that it overlaps with: a GPU with one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS`) begins
kernels in that order. Names, weights and checkpoints are those of Megatron-Core's layers, of which these are
subclasses. This module imports Megatron-Core, so call `Platform.install` first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_wrap.nn.kernels.weight_gradients import WeightGradients
from megatron_wrap.parallel.collectives import ExchangeOfShares, ProcessGroup, gathering
from megatron_wrap.platform.megatron_core.added_gradients import placeholder

_HIDING_COLUMNS = 1700
"""Columns of a row-parallel weight, for each other rank, from which computing the input's gradient for the rank's own
share takes longer than gathering the others' shares. With s tokens in a share and outputs of h elements, the matmul
with k columns has 2 s h k FLOPs and each other share 2 s h bytes: at 600 TFLOP/s and the 350 GB/s at which 32 MiB of
another H100 arrive (2026-11-26), k is 1,714."""


class GatheringColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron-Core's layer; each piece of a sequence-parallel input is multiplied while the next one arrives."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not kwargs["sequence_parallel"]:
            return super()._forward_impl(input, weight, *args, **kwargs)
        product = _GatheredMatmul.apply(input, weight, kwargs["gradient_accumulation_fusion"], kwargs["tp_group"])
        return product if kwargs["bias"] is None else product + kwargs["bias"]


class ScatteringRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron-Core's layer; each piece of a sequence-parallel output is sent while the next one is computed."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the layer, [S, B, in / tp] -> [S / tp, B, out]; and return the bias if the caller adds it."""
        if not self.sequence_parallel or self.tp_group.size() == 1 or self.explicit_expert_comm:
            return super().forward(input_)
        output = _ScatteredProduct.apply(input_, self.weight, self.gradient_accumulation_fusion, self.tp_group)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


class _GatheredMatmul(torch.autograd.Function):
    """Gathered [S / tp, B, in] times weight^T [in, out / tp]: [S, B, out / tp]. The backward pass gathers the input
    again, while it multiplies with the weight, instead of keeping tp times as much, and scatters the input's gradient
    while it computes the weight's, as Megatron-Core's layer does."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, weight: Tensor, accumulates: bool, group: Any) -> Tensor:
        ctx.save_for_backward(share, weight)
        ctx.accumulates, ctx.group = accumulates, group
        return gather_matmul(share, weight.t(), group, includes_self=False)[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        share, weight = ctx.saved_tensors
        grad, group = grads[0].contiguous(), ctx.group
        for_share, for_weight = ctx.needs_input_grad[:2]
        main_grad = _main_grad(weight, ctx.accumulates) if for_weight else None
        # each addition reads and writes the fp32 buffer; otherwise the rank's own share is copied
        in_parts = main_grad is not None and 2 * weight.shape[0] < share[..., 0].numel()
        inputs = gathering(share, group, includes_self=not in_parts) if for_weight else None
        of_share = start_matmul_scatter(grad, weight, group) if for_share else None
        if inputs is None:
            of_weight = None
        elif main_grad is not None and in_parts:
            local, *others = rows_of_shares(share.shape[0], group)
            WeightGradients.add(share, grad[local], main_grad)
            gathered = inputs()
            for rows in others:
                WeightGradients.add(gathered[rows], grad[rows], main_grad)
            of_weight = placeholder(weight)
        else:
            of_weight = _weight_gradient(inputs(), grad, weight, ctx.accumulates)
        return None if of_share is None else of_share(), of_weight, None, None


class _ScatteredProduct(torch.autograd.Function):
    """Product of [S, B, in / tp] and weight^T [in / tp, out], summed over ranks and scattered: [S / tp, B, out]."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, accumulates: bool, group: Any) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.accumulates, ctx.group = accumulates, group
        return start_matmul_scatter(inputs, weight.t(), group)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        share, group = grads[0].contiguous(), ctx.group
        main_grad = _main_grad(weight, ctx.accumulates) if ctx.needs_input_grad[1] else None
        if main_grad is None or weight.shape[1] >= _HIDING_COLUMNS * (group.size() - 1):
            grad, of_inputs = gather_matmul(share, weight, group, includes_self=True)
            of_weight = _weight_gradient(inputs, grad, weight, ctx.accumulates) if ctx.needs_input_grad[1] else None
            return of_inputs, of_weight, None, None

        def add_own(rows: slice) -> None:
            WeightGradients.add(inputs[rows], share, main_grad)

        grad, of_inputs = gather_matmul(share, weight, group, includes_self=False, meanwhile=add_own)
        for rows in rows_of_shares(share.shape[0], group)[1:]:
            WeightGradients.add(inputs[rows], grad[rows], main_grad)
        return of_inputs, placeholder(weight), None, None


def gather_matmul(
    share: Tensor,
    matrix: Tensor,
    group: ProcessGroup,
    *,
    includes_self: bool,
    meanwhile: Callable[[slice], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """The ranks' shares, gathered along the first dimension, and their product with a matrix. The rank's own share is
    multiplied while the others arrive.

    Args:
        share: [S / ranks, ..., K], the same shape on each rank.
        matrix: [K, N], of this rank.
        includes_self: whether the gathered shares contain the rank's own.
        meanwhile: function that is called with the rows of the rank's own share after its matmul, before the wait for
            the others.

    Returns:
        [S, ..., K], valid until the group's next gathering begins, and [S, ..., N]; without autograd.
    """
    wait = gathering(share, group, includes_self=includes_self)
    products = share.new_empty((group.size() * share.shape[0], *share.shape[1:-1], matrix.shape[1]))
    local, *others = rows_of_shares(share.shape[0], group)
    torch.mm(share.flatten(0, -2), matrix, out=products[local].flatten(0, -2))
    if meanwhile is not None:
        meanwhile(local)
    gathered = wait()
    for rows in others:
        torch.mm(gathered[rows].flatten(0, -2), matrix, out=products[rows].flatten(0, -2))
    return gathered, products


def rows_of_shares(length: int, group: ProcessGroup) -> list[slice]:
    """Rows of the rank's own share of `length` rows in the result of `gathering`; then the rows before and after it,
    where there are any."""
    start, stop, end = (length * number for number in (group.rank(), group.rank() + 1, group.size()))
    return [slice(start, stop), *(slice(*ends) for ends in ((0, start), (stop, end)) if ends[0] < ends[1])]


def start_matmul_scatter(rows: Tensor, matrix: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Multiply, and begin to send each other rank its share of the product along the first dimension. The rank's own
    share is multiplied during the transfers.

    Args:
        rows: [S, ..., K], of this rank; the ranks divide S.
        matrix: [K, N], of this rank.

    Returns:
        A function that waits for the other ranks' parts and returns [S / ranks, ..., N], this rank's share of the sum
        over ranks; without autograd.
    """
    size, rank = group.size(), group.rank()
    shares = rows.contiguous().chunk(size)
    exchange = ExchangeOfShares((*shares[0].shape[:-1], matrix.shape[1]), rows, group)
    for offset in range(1, size):
        exchange.send(shares[(rank + offset) % size] @ matrix, offset)
    product = shares[rank] @ matrix

    def finish() -> Tensor:
        for received in exchange.finish():
            product.add_(received)
        return product

    return finish


def _main_grad(weight: Any, accumulates: bool) -> Tensor | None:
    """Buffer to which the weight's gradient is added; None: the gradient is returned."""
    return getattr(weight, "main_grad", None) if accumulates else None


def _weight_gradient(inputs: Tensor, grad: Tensor, weight: Any, accumulates: bool) -> Tensor | None:
    """grad^T inputs [out, in], or the result of `placeholder` if the gradient was added to the buffer."""
    main_grad = _main_grad(weight, accumulates)
    if main_grad is None:
        return grad.flatten(0, -2).t() @ inputs.flatten(0, -2)
    WeightGradients.add(inputs, grad, main_grad)
    return placeholder(weight)
