"""Causal attention within each sequence of a packed row, by a kernel that takes the sequences' boundaries."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron_wrap.nn.packed_sequences import PackedSequences


@functools.cache
def varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's flash attention for packed sequences with the arguments of `varlen_attn`; None if this torch lacks it."""
    try:
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    known = set(inspect.signature(kernel).parameters)
    if not {"scale", "window_size"} <= known:
        return None

    def call(query: Tensor, key: Tensor, value: Tensor, *lengths: Any, **named: Any) -> Tensor:
        if query.shape[1] != key.shape[1]:
            if "enable_gqa" in known:
                named["enable_gqa"] = True
            else:  # older torch: the same kernel, but the copies cost memory
                key, value = (
                    tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value)
                )
        return kernel(query, key, value, *lengths, **named)

    return call


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scale: float,
    window: tuple[int, int] | None,
    gather: Callable[[Tensor], Tensor] | None,
    kernel: Callable[..., Tensor],
) -> Tensor:
    """Causal attention of this rank's queries, each within its own sequence.

    A context-parallel rank has two chunks of every sequence. It gathers the keys and values of all ranks and calls the
    kernel once for the first and once for the second chunks, whose last query has the position of the last key.

    Args:
        query: [t_local, 1, heads, d], in the order of `packed`.
        key: [t_local, 1, groups, d].
        value: [t_local, 1, groups, d_v], d_v <= d.
        packed: boundaries, on the same device.
        window: (left, right): a query attends at most `left` positions before its own; negative or None: all.
        gather: differentiable all-gather in rank order along dimension 0; None without context parallelism.
        kernel: from `varlen_kernel`, or a function with its arguments: (query, key, value [t, heads, d], cumulative
            numbers of queries and of keys int32 [N + 1], longest of each, scale, window_size) -> [t, heads, d].

    Returns:
        [t_local, 1, heads, d_v].
    """
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))  # the kernel needs heads of one size
    left = -1 if window is None else window[0]
    attend = functools.partial(kernel, scale=scale, window_size=(left, 0))
    query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
    if gather is None:
        cu_seqlens, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        output = attend(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
        return output[..., :width].unsqueeze(1)
    both = gather(torch.cat((key, value), dim=-1))
    outputs = []
    for half in packed.halves:
        keys, values = both.index_select(0, half.keys).split((key.shape[-1], value.shape[-1]), dim=-1)
        outputs.append(
            attend(
                query.index_select(0, half.queries),
                *(keys.contiguous(), values.contiguous()),
                *(half.cu_seqlens_q, half.cu_seqlens_k, half.longest_q, half.longest_k),
            )
        )
    assert packed.order is not None
    return torch.cat(outputs).index_select(0, packed.order)[..., :width].unsqueeze(1)
