"""Weight gradients of linear layers, added to the gradient buffer within the matmul."""

from __future__ import annotations

import torch
from torch import Tensor


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
