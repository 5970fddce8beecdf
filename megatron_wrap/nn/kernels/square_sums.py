"""Sums of squares of large tensors in Triton, for the norm of the gradient. Import it only where Triton is
installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _BLOCKS, _PROGRAMS_PER_PROCESSOR = 2048, 4, 8


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
        _square_sums_kernel[(programs,)](tensor, part, tensor.numel(), block=_BLOCK, blocks=_BLOCKS, num_warps=8)
    return parts.sum().view(1)
