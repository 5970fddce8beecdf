"""Weight gradients that layers add to the gradient buffer themselves: linear layers within the matmul, the lookup of
word embeddings only the rows of the micro-batch's tokens.

For a lookup torch returns a gradient of the whole vocabulary, which is set to zero in each micro-batch and then added
to the buffer, although a micro-batch has a small part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.platform.megatron_core.added_gradients import placeholder
from megatron_wrap.platform.megatron_core.first_gradients import zero_if_stale


class WeightGradients:
    """Weight gradients of a linear layer, added to the gradient buffer within the matmul. The class has the functions
    of Apex's `fused_weight_gradient_mlp_cuda`, which Megatron-Core calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """main_grad += grad_output^T inputs, in place, without rounding the product to the inputs' dtype.

        Args:
            inputs: [..., in], half precision or fp32.
            grad_output: [..., out] in the same dtype.
            main_grad: fp32 [out, in].
        """
        inputs = inputs.reshape(-1, inputs.shape[-1])
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        if inputs.dtype == torch.float32:
            main_grad.addmm_(grad_output.t(), inputs)
        else:
            torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=torch.float32, out=main_grad)

    @staticmethod
    def add(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """`wgrad_gemm_accum_fp32` or `wgrad_gemm_accum_fp16`, whichever suits the buffer."""
        if main_grad.dtype == torch.float32:
            WeightGradients.wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)
        else:
            WeightGradients.wgrad_gemm_accum_fp16(inputs, grad_output, main_grad)

    @staticmethod
    def wgrad_gemm_accum_fp16(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """main_grad += grad_output^T inputs, in place, with a gradient buffer in the inputs' dtype."""
        main_grad.addmm_(grad_output.reshape(-1, grad_output.shape[-1]).t(), inputs.reshape(-1, inputs.shape[-1]))


def can_accumulate_weight_gradients(device: torch.device) -> bool:
    """Whether this torch and this GPU multiply half-precision matrices into an fp32 one (`out_dtype` of `addmm`)."""
    if device.type != "cuda":
        return False
    half = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        WeightGradients.wgrad_gemm_accum_fp32(half, half, total)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


AddRowGradients = Callable[[Tensor, Tensor, Tensor], None]
"""Function (ids, gradient [*ids.shape, H], buffer [V, H]) that adds the gradient to the rows of the buffer in place."""


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, add: AddRowGradients) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.add = weight, add  # its values are not needed
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        zero_if_stale(ctx.weight.main_grad)
        ctx.add(ids, grad, ctx.weight.main_grad)
        return None, placeholder(ctx.weight), None


def _has_buffer(weight: Any) -> bool:
    """Whether each layer that uses the weight may add its gradient to an fp32 buffer. False for a weight that is tied
    to the output layer on this rank (`zero_out_wgrad`), whose gradient has the size of the vocabulary anyway."""
    main_grad = getattr(weight, "main_grad", None)
    is_fp32 = main_grad is not None and main_grad.dtype == torch.float32 and main_grad.is_contiguous()
    return is_fp32 and hasattr(weight, "grad_added_to_main_grad") and not getattr(weight, "zero_out_wgrad", False)


def lookup(ids: Tensor, weight: Tensor, add: AddRowGradients) -> Tensor:
    """`torch.nn.functional.embedding`. The gradient of a weight with an fp32 buffer of Megatron-Core is added to that,
    without rounding the sum of a row to the dtype of the weight.

    Args:
        ids: int64, indices in [0, V).
        weight: [V, H].
        add: function that adds the gradients of the rows.

    Returns:
        [*ids.shape, H].
    """
    if torch.is_grad_enabled() and weight.requires_grad and _has_buffer(weight):
        result: Tensor = _Lookup.apply(ids, weight, add)
        return result
    return F.embedding(ids, weight)
