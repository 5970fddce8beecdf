"""Weight gradients of all experts of a process in Triton, added to an fp32 buffer within the products. Import it only
where Triton is installed.

A program computes one tile of one expert's gradient over all of the expert's rows, and adds it to the buffer or writes
it there once, so the gradient is never rounded to half precision.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(
    grad,
    rows,
    ends,
    total,
    outputs,
    inputs,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    block_rows: tl.constexpr,
    group: tl.constexpr,
    overwrite: tl.constexpr,
):
    # Tiles of `group` rows of tiles are computed side by side, so that the second-level cache has their operands.
    expert = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    tiles_out, tiles_in = tl.cdiv(outputs, block_out), tl.cdiv(inputs, block_in)
    first = tile // (group * tiles_in) * group
    height = min(tiles_out - first, group)
    index_out = first + tile % (group * tiles_in) % height
    index_in = tile % (group * tiles_in) // height

    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    out = index_out * block_out + tl.arange(0, block_out)
    column = index_in * block_in + tl.arange(0, block_in)
    inside_out, inside_in = out < outputs, column < inputs
    row = begin + tl.arange(0, block_rows)
    grad_pointers = grad + row[:, None].to(tl.int64) * outputs + out[None, :]
    row_pointers = rows + row[:, None].to(tl.int64) * inputs + column[None, :]
    sums = tl.zeros([block_out, block_in], dtype=tl.float32)
    for start in range(begin, end, block_rows):
        inside = (start + tl.arange(0, block_rows)) < end
        left = tl.load(grad_pointers, mask=inside[:, None] & inside_out[None, :], other=0.0)
        right = tl.load(row_pointers, mask=inside[:, None] & inside_in[None, :], other=0.0)
        sums = tl.dot(tl.trans(left), right, sums)
        grad_pointers += block_rows * outputs
        row_pointers += block_rows * inputs
    target = total + expert * outputs * inputs + out[:, None].to(tl.int64) * inputs + column[None, :]
    mask = inside_out[:, None] & inside_in[None, :]
    if overwrite:
        tl.store(target, sums, mask=mask)  # zeros, if the expert has no row
    elif end > begin:
        # One program adds to an element, so the sum is reproducible; the memory adds, and the program does not wait.
        tl.atomic_add(target, sums, mask=mask, sem="relaxed")


def add_weight_gradients(grad: Tensor, rows: Tensor, ends: Tensor, total: Tensor, overwrite: bool = False) -> None:
    """total[e] += grad_e^T rows_e for the rows of each expert, without rounding the sum to the dtype of the rows.

    Args:
        grad: [R, out], contiguous, half precision, on a GPU: the gradient of the layer's output.
        rows: [R, in] in the same dtype, contiguous: the layer's input.
        ends: int32 [E]: 1 + the index of each expert's last row.
        total: [E, out, in], contiguous; fp32, or another dtype in which it is then added.
        overwrite: write the sums over `total`, whatever it contains, as if it were zeros.
    """
    experts, outputs, inputs = total.shape
    sizes = {"block_out": 128, "block_in": 256, "block_rows": 64, "group": 8, "overwrite": overwrite}
    tiles = triton.cdiv(outputs, sizes["block_out"]) * triton.cdiv(inputs, sizes["block_in"])
    _kernel[(tiles, experts)](grad, rows, ends, total, outputs, inputs, **sizes, num_warps=8, num_stages=4)
