"""Matmuls of the rows of all experts of a process in Triton. Import it only where `available.fills_expert_tiles` is
true.

One program for each multiprocessor computes tiles one after another; tiles of the same rows are consecutive. Loads of
the next tile are started before a tile is written. Rows of a tile that belong to the next expert are read as zeros and
not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged, store_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_wrap.nn.kernels.available import EXPERT_TILE_COLUMNS, EXPERT_TILE_ROWS

_IN = 64


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


def expert_products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
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
    stored = matrices.transpose(1, 2) if transposed else matrices
    block = [1, EXPERT_TILE_COLUMNS, _IN] if transposed else [1, _IN, EXPERT_TILE_COLUMNS]
    tiles = (triton.cdiv(rows.shape[0], EXPERT_TILE_ROWS) + experts) * triton.cdiv(outputs, EXPERT_TILE_COLUMNS)
    programs = min(tiles, torch.cuda.get_device_properties(rows.device).multi_processor_count)
    _expert_products_kernel[(programs,)](
        create_ragged_descriptor(rows, [EXPERT_TILE_ROWS, _IN]),
        TensorDescriptor(stored, list(stored.shape), list(stored.stride()), block),
        ends,
        create_ragged_descriptor(results, [EXPERT_TILE_ROWS, EXPERT_TILE_COLUMNS // 2]),
        *(experts, inputs, outputs),
        block_experts=triton.next_power_of_2(experts),
        block_rows=EXPERT_TILE_ROWS,
        block_in=_IN,
        block_out=EXPERT_TILE_COLUMNS,
        transposed=transposed,
        num_warps=8,
        num_stages=3,
    )
    return results
