"""One matmul for the rows of all experts of a process, forward and backward: torch's grouped matmul, or a kernel of
this package where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_wrap.nn.kernels.available import fills_expert_tiles, has_triton
from megatron_wrap.platform.megatron_core.added_gradients import placeholder
from megatron_wrap.platform.megatron_core.first_gradients import takes_first

ALIGNMENT_BYTES = 16
"""Alignment in bytes of the rows of a matrix in torch's grouped matmul (aten/src/ATen/native/GroupedMMUtils.h)."""


class RowEnds(NamedTuple):
    """Ends of the experts' rows, which are sorted by expert."""

    ends: Tensor
    """1 + the index of each expert's last row, int32 [E] on the device."""


class DeferredGradient:
    """The gradient of a weight of `grouped_linear`, which a later step of the backward pass computes.

    Args:
        weight: [E, out, in]; the later step returns its gradient.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._compute: Callable[[], Tensor] | None = None

    def keep(self, compute: Callable[[], Tensor]) -> None:
        """Keep the computation for `compute`."""
        self._compute = compute

    def compute(self) -> Tensor | None:
        """The gradient, as the backward pass of `grouped_linear` would have returned it; None: that backward pass has
        not run."""
        compute, self._compute = self._compute, None
        return None if compute is None else compute()


def grouped_linear(
    rows: Tensor, weight: Tensor, ends: Tensor, accumulate: bool = False, deferred: DeferredGradient | None = None
) -> Tensor:
    """Apply each expert's linear layer, without bias, to the expert's rows.

    Args:
        rows: [R, in], sorted by expert, in fp32 or half precision.
        weight: [E, out, in], a linear layer's weight of each expert.
        ends: int32 [E] on the same device: 1 + the index of each expert's last row; the last one is R. Nothing here
            waits for its values on a GPU.
        accumulate: add the weights' gradient to `weight.main_grad` (fp32 [E, out, in]) if there is one, without
            rounding it to the dtype of the rows, instead of returning it; or write it there (`first_gradients.py`).
        deferred: keeps the computation of the weights' gradient, which is then not returned here.

    Returns:
        [R, out] in the dtype of the rows.
    """
    result: Tensor = _GroupedLinear.apply(rows, weight, ends, accumulate, deferred)
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, accumulate: bool, deferred: DeferredGradient | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.accumulate, ctx.deferred = accumulate, deferred
        return _matmul(rows, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_rows = _matmul(grad, weight, ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_rows, None, None, None, None
        compute = partial(_weight_gradient, grad, rows, ends, weight, ctx.accumulate)
        if ctx.deferred is None:
            return of_rows, compute(), None, None, None
        ctx.deferred.keep(compute)
        return of_rows, None, None, None, None


def _matmul(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows [R, K], each times the matrix [K, N] of its expert in [E, K, N]: [R, N]."""
    width = matrices.shape[2]
    if rows.shape[0] == 0:
        return rows.new_zeros((0, width))
    if _padding(rows.shape[1], rows.dtype) or _padding(width, rows.dtype):
        rows, matrices = _aligned(rows, 1), _aligned(_aligned(matrices, 1), 2).contiguous()
        return functional.grouped_mm(rows, matrices, offs=ends)[:, :width].contiguous()
    if fills_expert_tiles(rows, matrices):
        from megatron_wrap.nn.kernels.expert_matmuls import expert_matmuls

        return expert_matmuls(rows, matrices, ends)
    return functional.grouped_mm(rows, matrices, offs=ends)


def _weight_gradient(grad: Tensor, rows: Tensor, ends: Tensor, weight: Any, accumulate: bool) -> Tensor | None:
    """The gradient [E, out, in] of the weights; if it has been added to `main_grad`, its placeholder."""
    main_grad = getattr(weight, "main_grad", None) if accumulate else None
    if main_grad is None:
        return _transposed_matmul(grad, rows, ends)
    is_first = takes_first(main_grad)
    if grad.is_cuda and grad.dtype != torch.float32 and has_triton():
        from megatron_wrap.nn.kernels.expert_matmuls import add_weight_gradients

        add_weight_gradients(grad, rows, ends, main_grad, overwrite=is_first)
    elif is_first:
        main_grad.copy_(_transposed_matmul(grad, rows, ends))
    else:
        main_grad.add_(_transposed_matmul(grad, rows, ends))
    return placeholder(weight)


def _transposed_matmul(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """grad^T rows of each expert: [R, out] and [R, in] to [E, out, in]."""
    if rows.shape[0] == 0:
        return rows.new_zeros((ends.shape[0], grad.shape[1], rows.shape[1]))
    outputs, inputs = grad.shape[1], rows.shape[1]
    result = functional.grouped_mm(_aligned(grad, 1).t(), _aligned(rows, 1), offs=ends)
    # Megatron-Core's all-reduce of a gradient with gaps reduces a copy (tensor_parallel/mappings.py, _reduce)
    return result[:, :outputs, :inputs].contiguous()


def _padding(size: int, dtype: torch.dtype) -> int:
    return -size % (ALIGNMENT_BYTES // dtype.itemsize)


def _aligned(matrix: Tensor, dim: int) -> Tensor:
    """`matrix` with columns of zeros after those of `dim`, so that its rows begin at multiples of the alignment."""
    missing = _padding(matrix.shape[dim], matrix.dtype)
    if missing == 0:
        return matrix
    return functional.pad(matrix, (0, 0) * (matrix.dim() - 1 - dim) + (0, missing))
