"""fp32 values as sums of bf16 values in Triton. Import it only where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _split_to_bf16_kernel(values, parts, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    rest = tl.load(values + row * columns + column, mask=inside, other=0.0)
    for number in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(parts + (3 * row + number) * columns + column, part, mask=inside)
        rest -= part.to(tl.float32)


def split(values: Tensor) -> Tensor:
    """Split fp32 values [N, columns] on a GPU into three tensors that add up to them, side by side: bf16 [N, 3 *
    columns]."""
    rows, columns = values.shape
    parts = torch.empty(rows, 3 * columns, dtype=torch.bfloat16, device=values.device)
    if rows:
        block = triton.next_power_of_2(columns)
        _split_to_bf16_kernel[(rows,)](values.contiguous(), parts, columns, block=block, num_warps=1)
    return parts
