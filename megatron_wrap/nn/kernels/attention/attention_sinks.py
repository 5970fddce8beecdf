"""Attention with a sink for each head: a score without a value, which takes a part of every query's weights
(arXiv:2309.17453; learned in gpt-oss, transformers/models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward).

A flash kernel computes outputs o and the logsumexp l of the scores without a sink. With the sink s, the sum of
exponentials is exp(l') with l' = logaddexp(l, s), so the output is o exp(l - l') = o sigmoid(l - s). The kernel's
backward pass recomputes the weights as exp(score - logsumexp) and subtracts the sum over a row of output times
gradient: with the scaled output and l' it returns the gradients of attention with the sink. The sink's gradient is
minus the sum over queries of exp(s - l') times these row sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_wrap.nn.kernels.attention.flash_attention import CpuKernel, GpuKernel, flash_attention

_HALF = (torch.float16, torch.bfloat16)
_MIN_CAPABILITY = (8, 0)
_MAX_HEAD_SIZE = 256


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    sinks: Tensor,
    scale: float,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """The counterpart of torch's `scaled_dot_product_attention` on any device, with grouped queries.

    Args:
        query: [b, heads, s_q, d]; key: [b, groups, s_k, d]; value: [b, groups, s_k, d_v].
        attn_mask: bool, broadcastable to [b, heads, s_q, s_k], True = attend; every query attends a key.
        sinks: [heads].
        is_causal: the mask is causal, aligned with the first key; without `attn_mask`.

    Returns:
        [b, heads, s_q, d_v].
    """
    if query.device.type == "cpu" and dropout_p == 0.0 and query.shape[-1] == value.shape[-1]:
        bias = None
        if attn_mask is not None:
            bias = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
            bias = bias[(None,) * (4 - bias.dim())]
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return flash_attention(query, key, value, sinks, CpuKernel(scale, is_causal, bias)).transpose(1, 2)
    return _by_stored_scores(query, key, value, attn_mask, sinks, scale, is_causal, dropout_p)


def _by_stored_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor,
    scale: float,
    is_causal: bool,
    dropout: float,
) -> Tensor:
    """Attention with a tensor of all scores, for cases that the kernels do not support: explicit masks and fp32 on
    GPUs, dropout."""
    copies = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(dtype) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    total = torch.logaddexp(scores.logsumexp(-1), sinks.to(dtype)[:, None])
    weights = (scores - total[..., None]).exp().to(value.dtype)
    return torch.dropout(weights, dropout, train=dropout > 0.0) @ value


def has_flash_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether `flash_attention_with_sinks` supports these tensors [..., heads, d]."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _HALF
        and torch.cuda.get_device_capability(query.device) >= _MIN_CAPABILITY
        and width == value.shape[-1] <= _MAX_HEAD_SIZE
        and width % 8 == 0
    )


def flash_attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    sinks: Tensor,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """Causal attention within concatenated sequences on a GPU: the kernel of `nn/packed_attention.py` with sinks.

    Args:
        query: [t, heads, d]; key, value: [t_k, groups, d], in half precision.
        cu_seqlens_q, cu_seqlens_k: cumulative numbers of queries and keys, int32 [N + 1].
        sinks: [heads].
        window_size: (left, 0): a query attends at most `left` positions before its own; -1: all.

    Returns:
        [t, heads, d].
    """
    kernel = GpuKernel((cu_seqlens_q, cu_seqlens_k, longest_q, longest_k), scale, window_size[0])
    return flash_attention(query, key, value, sinks, kernel)
