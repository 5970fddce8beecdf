"""Matmuls of the rows of all experts of a process in Triton, and the gradients of their weights. Import it only where
Triton is installed.

Matmuls, where `available.fills_expert_tiles` is true: one program for each multiprocessor computes tiles one after
another; tiles of the same rows are consecutive. Loads of the next tile are started before a tile is written. Rows of a
tile that belong to the next expert are read as zeros and not written.

Weight gradients are added to an fp32 buffer within the matmuls. A program computes one tile of one expert's gradient
over all of the expert's rows, and adds it to the buffer or writes it there once, so the gradient is never rounded to
half precision. There are two forms of the kernel: a program for each tile, which loads by pointers; and, where the GPU
loads by descriptors, a program for each multiprocessor, which computes tiles one after another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged, store_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_wrap.nn.kernels.available import EXPERT_TILE_COLUMNS, EXPERT_TILE_ROWS, can_load_tiles

_MATMUL_IN = 64
"""Columns of the rows that a matmul loads at a time."""


@triton.jit
def _expert_products_kernel(
    rows,
    matrices,
    ends,
    results,
    experts,
    inputs,
    outputs,
    block_experts: tl.constexpr,
    block_rows: tl.constexpr,
    block_in: tl.constexpr,
    block_out: tl.constexpr,
    transposed: tl.constexpr,
):
    index = tl.arange(0, block_experts)
    counts = tl.load(ends + index, mask=index < experts, other=0)
    counts -= tl.load(ends + index - 1, mask=(index > 0) & (index < experts), other=0)
    heights = tl.cdiv(counts, block_rows)  # rows of each expert, in tiles
    row_ends = tl.cumsum(heights, axis=0)
    across = tl.cdiv(outputs, block_out)
    for tile in tl.range(tl.program_id(0), tl.sum(heights, axis=0) * across, tl.num_programs(0), flatten=True):
        expert = tl.sum((row_ends <= tile // across).to(tl.int32), axis=0)
        above = tl.sum(tl.where(index < expert, heights, 0), axis=0)
        row, column = (tile // across - above) * block_rows, tile % across * block_out
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        count = tl.load(ends + expert) - begin
        sums = tl.zeros([block_rows, block_out], dtype=tl.float32)
        for start in range(0, inputs, block_in):
            left = load_ragged(rows, begin, count, [row, start])
            if transposed:
                right = matrices.load([expert, column, start]).reshape(block_out, block_in).T
            else:
                right = matrices.load([expert, start, column]).reshape(block_in, block_out)
            sums = tl.dot(left, right, sums)
        halves = tl.split(tl.permute(tl.reshape(sums, (block_rows, 2, block_out // 2)), (0, 2, 1)))
        for half in tl.static_range(2):  # half a tile at a time, for which the memory of the multiprocessor suffices
            values = halves[half].to(results.dtype)
            store_ragged(results, begin, count, [row, column + half * (block_out // 2)], values)


def expert_matmuls(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert, with sums in fp32.

    Args:
        rows: [R, K], contiguous, half precision, sorted by expert.
        matrices: [E, K, N] in the same dtype, contiguous, or the transposed view of a contiguous [E, N, K].
        ends: int32 [E] on the same GPU: 1 + the index of each expert's last row; the last one is R.

    Returns:
        [R, N] in the dtype of the rows.
    """
    experts, inputs, outputs = matrices.shape
    results = rows.new_empty(rows.shape[0], outputs)
    transposed = not matrices.is_contiguous()
    contiguous = matrices.transpose(1, 2) if transposed else matrices
    block = [1, EXPERT_TILE_COLUMNS, _MATMUL_IN] if transposed else [1, _MATMUL_IN, EXPERT_TILE_COLUMNS]
    tiles = (triton.cdiv(rows.shape[0], EXPERT_TILE_ROWS) + experts) * triton.cdiv(outputs, EXPERT_TILE_COLUMNS)
    programs = min(tiles, torch.cuda.get_device_properties(rows.device).multi_processor_count)
    _expert_products_kernel[(programs,)](
        create_ragged_descriptor(rows, [EXPERT_TILE_ROWS, _MATMUL_IN]),
        TensorDescriptor(contiguous, list(contiguous.shape), list(contiguous.stride()), block),
        ends,
        create_ragged_descriptor(results, [EXPERT_TILE_ROWS, EXPERT_TILE_COLUMNS // 2]),
        *(experts, inputs, outputs),
        block_experts=triton.next_power_of_2(experts),
        block_rows=EXPERT_TILE_ROWS,
        block_in=_MATMUL_IN,
        block_out=EXPERT_TILE_COLUMNS,
        transposed=transposed,
        num_warps=8,
        num_stages=3,
    )
    return results


_OUT, _IN, _ROWS, _GROUP = 128, 256, 64, 8
"""Outputs and inputs of a tile of a weight gradient; rows loaded at a time; rows of tiles computed side by side."""


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
