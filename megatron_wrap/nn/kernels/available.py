"""Conditions under which the kernels of this folder run on a device."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, float64

from megatron_wrap.nn.kernels.weight_gradients import WeightGradients, can_accumulate_weight_gradients, lookup
from megatron_wrap.platform.megatron_core.kernels import LayerKernels

TILE_ALIGNMENT_BYTES = 16
"""Alignment in bytes of the rows of a matrix whose tiles are loaded by descriptors (CUDA driver API,
cuTensorMapEncodeTiled)."""

EXPERT_TILE_ROWS, EXPERT_TILE_COLUMNS = 128, 256
"""Rows and columns of the result that a program of `expert_matmuls` computes at once."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; its kernels need a GPU."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_liger() -> bool:
    """Whether Liger-Kernel is installed (extra `gpu`); its kernels need a GPU."""
    return has_triton() and importlib.util.find_spec("liger_kernel") is not None


def can_convolve(rows: Tensor) -> bool:
    """Whether `short_convolution.convolved_heads` supports these rows on this machine."""
    return rows.is_cuda and rows.dtype != torch.float64 and rows.numel() > 0 and has_triton()


def latent_rotary_kernel(x: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """`rotary_projections.latent_rotary`, if it supports tensors of this dtype and device on this machine."""
    if not x.is_cuda or x.dtype == torch.float64 or x.numel() == 0 or not has_triton():
        return None
    from megatron_wrap.nn.kernels.rotary_projections import latent_rotary

    return latent_rotary


@functools.cache
def _loads_tiles(device: torch.device) -> bool:
    # Hopper's tensor memory accelerator; the kernels that use it are tuned for that generation.
    if not has_triton() or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


def can_load_tiles(matrix: Tensor) -> bool:
    """Whether Triton loads tiles of a matrix by descriptors on its GPU.

    Args:
        matrix: [R, columns], contiguous, on a GPU.
    """
    row_bytes = matrix.shape[1] * matrix.dtype.itemsize
    aligned = matrix.data_ptr() % TILE_ALIGNMENT_BYTES == 0 and row_bytes % TILE_ALIGNMENT_BYTES == 0
    return matrix.numel() > 0 and aligned and _loads_tiles(matrix.device)


def fills_expert_tiles(rows: Tensor, matrices: Tensor) -> bool:
    """Whether `expert_matmuls` supports these matrices on this machine and most of its tiles are full. It is then
    faster than torch's grouped matmul.

    Args:
        rows: [R, K].
        matrices: [E, K, N], one for each expert.
    """
    experts, *sizes = matrices.shape
    if not rows.is_cuda or rows.dtype.itemsize != 2:
        return False
    if rows.shape[0] < EXPERT_TILE_ROWS * experts or min(sizes) < EXPERT_TILE_COLUMNS:  # such as an adapter's rank
        return False
    contiguous = matrices if matrices.is_contiguous() else matrices.transpose(1, 2)
    if not (rows.is_contiguous() and contiguous.is_contiguous()):
        return False
    return can_load_tiles(rows) and can_load_tiles(contiguous.flatten(0, 1))


def layer_kernels(device: torch.device, training: bool = True) -> LayerKernels:
    """The kernels that replace functions of Megatron-Core on a device; none on a CPU.

    Args:
        training: False omits kernels of the backward pass, whose support by the device is tested with a matmul.
    """
    if device.type != "cuda":
        return LayerKernels()
    weight_gradients = WeightGradients if training and can_accumulate_weight_gradients(device) else None
    if not has_triton():
        return LayerKernels(weight_gradients=weight_gradients)
    from megatron_wrap.nn.kernels.embedding_rows import add_row_gradients
    from megatron_wrap.nn.kernels.rotary import apply_rotary

    embedding = functools.partial(lookup, add=add_row_gradients) if training else None
    kernels = LayerKernels(rotary=apply_rotary, weight_gradients=weight_gradients, embedding=embedding)
    if not has_liger():
        return kernels
    from megatron_wrap.nn.kernels.swiglu import swiglu

    return dataclasses.replace(kernels, swiglu=swiglu)


MAX_EXPERTS = 1024
"""Maximum number of experts that the kernel supports: it keeps their scores in registers."""


class Selection(NamedTuple):
    """Selection and weighting of experts (megatron/core/transformer/moe/moe_utils.py,
    `topk_routing_with_score_function`)."""

    topk: int
    sigmoid: bool
    """Whether scores are sigmoid(logits), which do not compete; else softmax(logits)."""
    softmax_first: bool
    """Whether weights are the unchanged scores; else the weights of a token add up to 1. Without effect on sigmoid."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of experts, of which a token's are chosen first; 1: all experts are in one."""
    group_topk: int = 1
    """Number of groups that are chosen for a token."""
    group_score_experts: int = 1
    """Number of a group's highest scores that add up to the group's score."""


def can_route(logits: Tensor, selection: Selection) -> bool:
    """Whether the kernel supports these logits [T, experts] on this machine. With groups, the numbers of experts and of
    groups must be powers of two."""
    experts = logits.shape[-1]
    sizes = (experts, selection.groups) if selection.groups > 1 else ()
    fits = experts <= MAX_EXPERTS and all(size & (size - 1) == 0 for size in sizes)
    return logits.is_cuda and logits.dtype != float64 and fits and has_triton()
