"""Matmuls of low-rank adapters with as few passes over large tensors as possible.

An adapter has little arithmetic; its time goes into reading and writing activations. Adapters of all linear layers of
Llama 3.1 8B move 4.6 GB for each layer and 8,192 tokens; separate additions of base and adapter would move another 2.3
GB. So the matmul itself accumulates into the tensor (`beta` of cuBLAS), in memory that no other code reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class InputMatmul(torch.autograd.Function):
    """(inputs, A) -> the inputs for the base, and the adapter's product inputs A^T.

    Its backward pass adds the adapter's gradient of the inputs to the base's in place. That memory is the result of the
    base's own matmul, so only the base may consume the first result.

    Args of `apply`: inputs [..., I], A [R, I].
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The inputs, and inputs A^T."""
        ctx.save_for_backward(inputs.flatten(0, -2), a)
        return inputs, torch.nn.functional.linear(inputs, a)

    @staticmethod
    def backward(ctx: Any, of_base: Tensor, of_product: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Gradients of the inputs and of A."""
        inputs, a = ctx.saved_tensors
        rows = of_product.flatten(0, -2)
        of_a = rows.t() @ inputs if ctx.needs_input_grad[1] else None
        return accumulated(of_base, rows, a), of_a


@dataclass(frozen=True)
class LayerPart:
    """Position of a matrix B [rows, R_i] in the matrix [outputs, R] of a fused layer."""

    rows: Tensor
    """Row indices in the fused matrix, int64 [rows]."""
    columns: slice
    scale: float


class OutputMatmul(torch.autograd.Function):
    """output + product B^T, in the memory of `output`, where B has each scaled part in its rows and columns and is zero
    elsewhere.

    No backward pass may have saved `output`. This holds for the new result of a linear layer, whose backward pass needs
    only its inputs.

    Args of `apply`: output [..., O], product [..., R], the parts, and the matrix of each.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, output: Tensor, product: Tensor, parts: Sequence[LayerPart], *matrices: Tensor
    ) -> Tensor:
        """The sum, in the memory of `output`."""
        whole = assembled(parts, matrices, output.shape[-1], product.shape[-1])
        rows = product.flatten(0, -2)
        ctx.save_for_backward(rows, whole)
        ctx.parts = parts
        # `data`: a view that autograd does not know, because Megatron-Core's functions may return their argument
        return accumulated(output.data, rows, whole.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of the arguments."""
        product, whole = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        of_matrices: list[Tensor | None] = [None] * len(needed)
        if any(needed):
            of_whole = gradient.flatten(0, -2).t() @ product
            for number, part in enumerate(ctx.parts):
                if needed[number]:
                    of_matrices[number] = of_whole[:, part.columns].index_select(0, part.rows) * part.scale
        return gradient, gradient @ whole, None, *of_matrices


def assembled(parts: Sequence[LayerPart], matrices: Sequence[Tensor], outputs: int, rank: int) -> Tensor:
    """The fused matrix [outputs, rank]: each scaled matrix in its rows and columns, zero elsewhere; differentiable."""
    (first, *_), (matrix, *_) = parts, matrices
    if len(parts) == 1 and tuple(matrix.shape) == (outputs, rank):  # such a part has all rows in their order
        return matrix * first.scale
    whole = matrix.new_zeros(outputs, rank)
    for part, values in zip(parts, matrices, strict=True):
        whole[:, part.columns].index_copy_(0, part.rows, values * part.scale)
    return whole


def accumulated(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total [..., N] + left [M, K] right [K, N], in the memory of `total` if that has their dtype and no gaps."""
    if not total.is_contiguous() or total.dtype != left.dtype:
        return total + (left @ right).view(total.shape)
    total.view(-1, total.shape[-1]).addmm_(left, right)
    return total
