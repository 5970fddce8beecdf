"""Attention with a sink for each head: a score without a value, which takes a part of every query's weights
(arXiv:2309.17453; learned in gpt-oss, transformers/models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward).

A flash kernel computes outputs o and the logsumexp l of the scores without a sink. With the sink s, the sum of
exponentials is exp(l') with l' = logaddexp(l, s), so the output is o exp(l - l') = o sigmoid(l - s). The kernel's
backward pass recomputes the weights as exp(score - logsumexp) and subtracts the sum over a row of output times
gradient: with the scaled output and l' it returns the gradients of attention with the sink. The sink's is minus the sum
of exp(s - l') times these sums of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_HALF = (torch.float16, torch.bfloat16)
_MIN_CAPABILITY = (8, 0)
_MAX_HEAD_SIZE = 256


class _Kernel(Protocol):
    """A flash attention. Tensors are [..., s, heads, d], the logsumexp is fp32 [..., heads, s]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output and logsumexp."""

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; saved: these, the output and the logsumexp."""


class _OnCpu(NamedTuple):
    """torch's flash attention for CPUs; `bias` [.., .., s_q, s_k] is added to the scores."""

    scale: float
    is_causal: bool
    bias: Tensor | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, 0.0, self.is_causal, attn_mask=self.bias, scale=self.scale
        )
        return output.transpose(1, 2), total

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, total = saved
        heads_first = (tensor.transpose(1, 2) for tensor in (grad, *tensors))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, total, 0.0, self.is_causal, attn_mask=self.bias, scale=self.scale
        )
        of_query, of_key, of_value = (gradient.transpose(1, 2) for gradient in gradients)
        return of_query, of_key, of_value


class _OnGpu(NamedTuple):
    """torch's flash attention for sequences that are concatenated (torch/nn/attention/varlen.py); causal, where the
    last query of a sequence has the position of its last key."""

    lengths: tuple[Tensor, Tensor, int, int]
    """Cumulative numbers of queries and of keys, int32 [N + 1], and the longest of each."""
    scale: float
    left: int
    """Keys before a query's own that it attends; -1: all."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        window = {"window_size_left": self.left, "window_size_right": 0}
        output, total, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *self.lengths, 0.0, True, False, scale=self.scale, **window
        )
        return output, total

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, total = saved
        # without dropout the state of the random generator is not read
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, device=query.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(grad.contiguous(), query, key, value, output, total, *self.lengths, 0.0, True, random_state, unused),
            scale=self.scale,
            window_size_left=self.left,
            window_size_right=0,
        )
        return gradients


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: _Kernel) -> Tensor:
        output, without = kernel.forward(query, key, value)
        total = torch.logaddexp(without, sinks.to(without.dtype)[:, None])
        share = (without - total).exp().transpose(-1, -2)[..., None]
        output = (output * share).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total, sinks)
        ctx.kernel = kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        *saved, sinks = ctx.saved_tensors
        output, total = saved[-2:]
        gradients = ctx.kernel.backward(grads[0], *saved)
        sums = (grads[0].to(total.dtype) * output).sum(-1).transpose(-1, -2)
        of_sinks = -((sinks.to(total.dtype)[:, None] - total).exp() * sums)
        others = [dim for dim in range(of_sinks.dim()) if dim != of_sinks.dim() - 2]
        return *gradients, of_sinks.sum(others).to(sinks.dtype), None


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
        kernel = _OnCpu(scale, is_causal, bias)
        output: Tensor = _WithSinks.apply(*(each.transpose(1, 2) for each in (query, key, value)), sinks, kernel)
        return output.transpose(1, 2)
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
    """With a tensor of all scores, for what the kernels do not support: explicit masks and fp32 on GPUs, dropout."""
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
    kernel = _OnGpu((cu_seqlens_q, cu_seqlens_k, longest_q, longest_k), scale, window_size[0])
    output: Tensor = _WithSinks.apply(query, key, value, sinks, kernel)
    return output
