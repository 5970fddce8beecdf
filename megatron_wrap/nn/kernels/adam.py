"""Adam in Triton, which multiplies gradients by a factor as it reads them, writes a copy of the parameter in another
dtype, and does nothing where the factor is nan. Import it only where Triton is installed."""

from __future__ import annotations

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
