"""Adam's update and the sums of squares for the norm of the gradient, in Triton. Import it only where Triton is
installed.

The update multiplies gradients by a factor as it reads them, writes a copy of the parameter in another dtype, and does
nothing where the factor is nan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _adam_kernel(
    values,
    grads,
    first,
    second,
    copy,
    count,
    factors,
    step_size,
    kept,
    added_decay,
    beta1,
    beta2,
    rest1,
    rest2,
    root_of_correction,
    eps,
    block: tl.constexpr,
    copies: tl.constexpr,
):
    # torch's order of operations (aten/src/ATen/native/cuda/fused_adam_utils.cuh)
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    factor = tl.load(factors)
    inside = index < tl.where(factor == factor, count, 0)
    value = tl.load(values + index, mask=inside)
    grad = tl.load(grads + index, mask=inside) * factor
    grad += added_decay * value
    value *= kept
    mean = beta1 * tl.load(first + index, mask=inside) + rest1 * grad
    square = beta2 * tl.load(second + index, mask=inside) + rest2 * grad * grad
    value -= step_size * tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root_of_correction) + eps)
    tl.store(values + index, value, mask=inside)
    if copies:
        tl.store(copy + index, value.to(copy.dtype.element_ty), mask=inside)
    tl.store(first + index, mean, mask=inside)
    tl.store(second + index, square, mask=inside)


def update(
    values: Tensor,
    grads: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    factor: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    copy: Tensor | None = None,
) -> None:
    """One step of Adam (arXiv:1412.6980), in place.

    Args:
        values: the parameter, fp32 and contiguous on a GPU; the other tensors have its shape and dtype.
        grads: the gradients, which are not changed.
        first, second: running averages of the gradient and of its square.
        step: number of the step, from 1 on.
        factor: factor of the gradients, fp32 with one element, on the GPU; nan: nothing is written.
        decoupled: weight decay as in AdamW (arXiv:1711.05101), else added to the gradient.
        copy: contiguous tensor with as many elements, to which the new values are written in its dtype.
    """
    count = values.numel()
    if not count:
        return
    beta1, beta2 = betas
    _adam_kernel[(triton.cdiv(count, _BLOCK),)](
        *(values, grads, first, second, values if copy is None else copy, count, factor, lr / (1.0 - beta1**step)),
        *(1.0 - lr * weight_decay if decoupled else 1.0, 0.0 if decoupled else weight_decay),
        *(beta1, beta2, 1.0 - beta1, 1.0 - beta2, (1.0 - beta2**step) ** 0.5, eps),
        block=_BLOCK,
        copies=copy is not None,
        num_warps=4,
    )


_SQUARES, _BLOCKS, _PROGRAMS_PER_PROCESSOR = 2048, 4, 8


@triton.jit
def _square_sums_kernel(values, parts, count, block: tl.constexpr, blocks: tl.constexpr):
    sums = tl.zeros([block], dtype=tl.float32)
    stride = tl.num_programs(0).to(tl.int64) * block * blocks
    for start in range(tl.program_id(0).to(tl.int64) * block * blocks, count, stride):
        for number in tl.static_range(blocks):
            index = start + number * block + tl.arange(0, block)
            value = tl.load(values + index, mask=index < count, other=0.0).to(tl.float32)
            sums += value * value
    tl.store(parts + tl.program_id(0), tl.sum(sums, axis=0))


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, in fp32 and always in the same order.

    Args:
        tensors: contiguous, on one GPU; a kernel for each, so they should be large.

    Returns:
        fp32 [1].
    """
    device = tensors[0].device
    programs = torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_PROCESSOR
    parts = torch.empty(len(tensors), programs, dtype=torch.float32, device=device)
    for tensor, part in zip(tensors, parts, strict=True):
        _square_sums_kernel[(programs,)](tensor, part, tensor.numel(), block=_SQUARES, blocks=_BLOCKS, num_warps=8)
    return parts.sum().view(1)
