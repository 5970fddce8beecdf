"""The merge of two attentions of the same queries to different keys in Triton, which reads and writes outputs once.
Arithmetic is in fp32. Import it only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ELEMENTS = 4096


@triton.jit
def _merge_attention_kernel(
    output,
    total,
    other,
    other_total,
    heads,
    rows,
    width,
    output_batch,
    output_token,
    output_head,
    other_batch,
    other_token,
    other_head,
    total_batch,
    total_head,
    total_token,
    other_total_batch,
    other_total_head,
    other_total_token,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    token, head, inside = row // heads, row % heads, row < rows
    first = tl.load(total + batch * total_batch + head * total_head + token * total_token, mask=inside, other=0.0)
    second = tl.load(
        other_total + batch * other_total_batch + head * other_total_head + token * other_total_token,
        mask=inside,
        other=0.0,
    )
    share = tl.sigmoid(second - first)
    larger = tl.maximum(first, second)
    merged = larger + tl.log(tl.exp(first - larger) + tl.exp(second - larger))
    tl.debug_barrier()  # several threads read each logsumexp: none writes where another one has not read yet
    tl.store(total + batch * total_batch + head * total_head + token * total_token, merged, mask=inside)
    column = tl.arange(0, block_width)
    cells = inside[:, None] & (column < width)[None, :]
    of_output = output + (batch * output_batch + token * output_token + head * output_head)[:, None] + column[None, :]
    of_other = other + (batch * other_batch + token * other_token + head * other_head)[:, None] + column[None, :]
    value = tl.load(of_output, mask=cells, other=0.0).to(tl.float32)
    change = tl.load(of_other, mask=cells, other=0.0).to(tl.float32) - value
    tl.store(of_output, (value + share[:, None] * change).to(output.dtype.element_ty), mask=cells)


def merge_parts_(output: Tensor, total: Tensor, other: Tensor, other_total: Tensor) -> None:
    """Merge the attention of the same queries to further keys into `output` and `total`, in place.

    Args:
        output: [b, s, heads, d] on a GPU in any floating dtype but float64, without gaps in the last dimension.
        total: fp32 [b, heads, s], the logsumexp.
        other: output of the attention to the further keys, in the shape of `output`, in any of these dtypes.
        other_total: logsumexp of `other`, in the shape and dtype of `total`.
    """
    batch, tokens, heads, width = output.shape
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, _BLOCK_ELEMENTS // block_width)
    strides = (*output.stride()[:3], *other.stride()[:3], *total.stride(), *other_total.stride())
    _merge_attention_kernel[(triton.cdiv(tokens * heads, block_rows), batch)](
        *(output, total, other, other_total, heads, tokens * heads, width, *strides),
        block_rows=block_rows,
        block_width=block_width,
        num_warps=4,
    )
