"""Elementwise operations of a layer and the accumulation of weight gradients in one kernel each, with the arguments of
the functions of Megatron-Core that they replace (`platform/kernels.py`)."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_wrap.platform.kernels import LayerKernels

MAX_NORM_COLUMNS = 16384
"""Of `rms_norm`: a row is in the registers of one program."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; its kernels need a GPU."""
    return importlib.util.find_spec("triton") is not None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor) -> Tensor:
        from megatron_wrap.ops import triton_swiglu

        gates = gates.contiguous()
        ctx.save_for_backward(gates)
        return triton_swiglu.swiglu_forward(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        from megatron_wrap.ops import triton_swiglu

        (gates,) = ctx.saved_tensors
        return triton_swiglu.swiglu_backward(gates, grad_outputs[0].contiguous())


def swiglu(gates: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension (Shazeer 2020, arXiv:2002.05202, without biases).

    Args:
        gates: [..., 2F] on a GPU, in any floating dtype; computed in fp32.

    Returns:
        [..., F] in the same dtype.
    """
    return _SwiGLU.apply(gates.reshape(-1, gates.shape[-1])).view(*gates.shape[:-1], -1)


_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _cos_sin(angles: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """fp32 [S, R / 2] each, of the angles of the pairs; computed once for a tensor of angles, which layers share."""
    if angles not in _TABLES:
        flat = angles.detach().reshape(angles.shape[0], angles.shape[-1]).float()
        of_pairs = flat[:, ::2] if interleaved else flat[:, : flat.shape[1] // 2]
        _TABLES[angles] = (of_pairs.cos().contiguous(), of_pairs.sin().contiguous())
    return _TABLES[angles]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        from megatron_wrap.ops import triton_rotary

        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return triton_rotary.rotate(_last_contiguous(tensor), cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        from megatron_wrap.ops import triton_rotary

        cos, sin = ctx.saved_tensors
        grad = _last_contiguous(grad_outputs[0])
        return triton_rotary.rotate(grad, cos, sin, ctx.interleaved, inverse=True), None, None, None


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def apply_rotary(tensor: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of queries or keys.

    Args:
        tensor: [S, B, heads, D] on a GPU.
        angles: [S, 1, 1, R] in radians, R <= D, the two entries of a pair equal; the entries from R on are copied.
        interleaved: pairs are neighbours instead of entries i and i + R / 2.

    Returns:
        [S, B, heads, D] in the dtype of `tensor`; sines and cosines are fp32.
    """
    return _Rotary.apply(tensor, *_cos_sin(angles, interleaved), interleaved)


class _SplitRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor, queries: int, width: int, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        from megatron_wrap.ops import triton_rotary

        ctx.save_for_backward(cos, sin)
        ctx.queries, ctx.interleaved = queries, interleaved
        return triton_rotary.split_and_rotate(mixed.contiguous(), cos, sin, queries, width, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        from megatron_wrap.ops import triton_rotary

        cos, sin = ctx.saved_tensors
        query, key, value = (grad.contiguous() for grad in grad_outputs)
        mixed = triton_rotary.merge_gradients(query, key, value, cos, sin, ctx.queries, ctx.interleaved)
        return mixed, None, None, None, None, None


def split_rotary(
    mixed: Tensor, angles: Tensor, queries: int, width: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one projection, with the rotary position embedding of the first two: instead of a
    split, a copy of the queries and two rotations, and in the backward their gradients and a concatenation.

    Args:
        mixed: [S, B, groups, (queries + 2) * width] on a GPU: of each group its queries, its key and its value.
        angles: as for `apply_rotary`.
        queries: query heads of a group.
        width: head size.

    Returns:
        [S, B, groups * queries, width], [S, B, groups, width] and [S, B, groups, width], each contiguous.
    """
    return _SplitRotary.apply(mixed, *_cos_sin(angles, interleaved), queries, width, interleaved)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float, zero_centered: bool) -> Tensor:
        from megatron_wrap.ops import triton_norm

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, scale = triton_norm.rms_norm(flat, gamma, eps, zero_centered)
        ctx.save_for_backward(flat, gamma, scale)
        ctx.zero_centered = zero_centered
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from megatron_wrap.ops import triton_norm

        x, gamma, scale = ctx.saved_tensors
        grad_y = grad_outputs[0].reshape(x.shape).contiguous()
        grad_x, grad_gamma = triton_norm.rms_norm_gradients(x, gamma, scale, grad_y, ctx.zero_centered)
        return grad_x.view(grad_outputs[0].shape), grad_gamma, None, None


def rms_norm(x: Tensor, gamma: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        x: [..., H] on a GPU, H at most `MAX_NORM_COLUMNS`; computed in fp32.
        gamma: [H].
        zero_centered: gamma is stored minus 1.

    Returns:
        [..., H] in gamma's dtype.
    """
    return _RMSNorm.apply(x, gamma, eps, zero_centered)


def can_normalize(x: Tensor) -> bool:
    """Whether `rms_norm` takes this input here."""
    fits = x.numel() > 0 and x.shape[-1] <= MAX_NORM_COLUMNS
    return x.is_cuda and x.dtype != torch.float64 and fits and has_triton()


class WeightGradients:
    """Products of a linear layer's input and output gradient, added to the gradient buffer within the product. Has the
    functions of Apex's `fused_weight_gradient_mlp_cuda`, which Megatron-Core calls."""

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
    def wgrad_gemm_accum_fp16(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """The same with a gradient buffer in the inputs' dtype."""
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


def layer_kernels(device: torch.device) -> LayerKernels:
    """The kernels of this module that run on a device; none on a CPU."""
    if device.type != "cuda":
        return LayerKernels()
    weight_gradients = WeightGradients if can_accumulate_weight_gradients(device) else None
    if not has_triton():
        return LayerKernels(weight_gradients=weight_gradients)
    return LayerKernels(swiglu=swiglu, rotary=apply_rotary, weight_gradients=weight_gradients)
