"""Weight gradients of all experts of a process in Triton, added to an fp32 buffer within the matmuls. Import it only
where Triton is installed.

A program computes one tile of one expert's gradient over all of the expert's rows, and adds it to the buffer or writes
it there once, so the gradient is never rounded to half precision. There are two forms of the kernel: a program for each
tile, which loads by pointers; and, where the GPU loads by descriptors, a program for each multiprocessor, which
computes tiles one after another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from megatron_wrap.nn.kernels.available import can_load_tiles

_OUT, _IN, _ROWS, _GROUP = 128, 256, 64, 8


@triton.jit
def _tile_at(tile, tiles_out, tiles_in, group: tl.constexpr):
    # Tiles of `group` rows of tiles are computed side by side, so that the second-level cache has their operands.
    first = tile // (group * tiles_in) * group
    height = min(tiles_out - first, group)
    return first + tile % (group * tiles_in) % height, tile % (group * tiles_in) // height


@triton.jit
def _put(total, sums, expert, out, column, outputs, inputs, filled, overwrite: tl.constexpr):
    target = total + expert.to(tl.int64) * outputs * inputs + out[:, None].to(tl.int64) * inputs + column[None, :]
    mask = (out < outputs)[:, None] & (column < inputs)[None, :]
    if overwrite:
        tl.store(target, sums, mask=mask)  # zeros, if the expert has no row
    else:
        # One program adds to an element, so the sum is reproducible; the memory adds, and the program does not wait.
        tl.atomic_add(target, sums, mask=mask & filled, sem="relaxed")


@triton.jit
def _weight_gradients_by_pointers_kernel(
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
    expert = tl.program_id(1)
    index_out, index_in = _tile_at(tl.program_id(0), tl.cdiv(outputs, block_out), tl.cdiv(inputs, block_in), group)
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
    _put(total, sums, expert, out, column, outputs, inputs, end > begin, overwrite)


@triton.jit
def _weight_gradients_by_descriptors_kernel(
    grad,
    rows,
    ends,
    total,
    outputs,
    inputs,
    experts,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    block_rows: tl.constexpr,
    group: tl.constexpr,
    overwrite: tl.constexpr,
):
    tiles_out, tiles_in = tl.cdiv(outputs, block_out), tl.cdiv(inputs, block_in)
    tiles = tiles_out * tiles_in
    for number in tl.range(tl.program_id(0), experts * tiles, tl.num_programs(0)):
        expert = number // tiles
        index_out, index_in = _tile_at(number % tiles, tiles_out, tiles_in, group)
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        count = tl.load(ends + expert) - begin
        sums = tl.zeros([block_out, block_in], dtype=tl.float32)
        for start in range(0, count, block_rows):
            # rows of the next expert are zeros
            left = load_ragged(grad, begin, count, [start, index_out * block_out])
            right = load_ragged(rows, begin, count, [start, index_in * block_in])
            sums = tl.dot(tl.trans(left), right, sums)
        out = index_out * block_out + tl.arange(0, block_out)
        column = index_in * block_in + tl.arange(0, block_in)
        _put(total, sums, expert, out, column, outputs, inputs, count > 0, overwrite)


def add_weight_gradients(grad: Tensor, rows: Tensor, ends: Tensor, total: Tensor, overwrite: bool = False) -> None:
    """total[e] += grad_e^T rows_e for the rows of each expert, without rounding the sum to the dtype of the rows.

    Args:
        grad: [R, out], contiguous, half precision, on a GPU: the gradient of the layer's output.
        rows: [R, in] in the same dtype, contiguous: the layer's input.
        ends: int32 [E]: 1 + the index of each expert's last row.
        total: [E, out, in], contiguous; fp32, or another dtype, in which sums are then added.
        overwrite: write the sums over `total`, whatever it contains, as if it were zeros.
    """
    experts, outputs, inputs = total.shape
    sizes = {"block_out": _OUT, "block_in": _IN, "block_rows": _ROWS, "group": _GROUP, "overwrite": overwrite}
    tiles = triton.cdiv(outputs, _OUT) * triton.cdiv(inputs, _IN)
    if can_load_tiles(grad) and can_load_tiles(rows):
        programs = min(experts * tiles, torch.cuda.get_device_properties(grad.device).multi_processor_count)
        left, right = create_ragged_descriptor(grad, [_ROWS, _OUT]), create_ragged_descriptor(rows, [_ROWS, _IN])
        _weight_gradients_by_descriptors_kernel[(programs,)](
            left, right, ends, total, outputs, inputs, experts, **sizes, num_warps=8, num_stages=4
        )
    else:
        _weight_gradients_by_pointers_kernel[(tiles, experts)](
            grad, rows, ends, total, outputs, inputs, **sizes, num_warps=8, num_stages=4
        )
