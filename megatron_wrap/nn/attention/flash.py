"""Flash attentions of torch with the logsumexp of the scores, and attention that is differentiable through one, with
keys of other ranks and with sinks.

A backward pass recomputes the weights as exp(score - logsumexp) and subtracts the sum over a row of output times
gradient (FlashAttention-2, arXiv:2307.08691, algorithm 2). So with the output and logsumexp over more keys than a call
has, it returns the gradients of this call's part; `ring.py` adds the keys of other ranks in this way.

A sink of a head is a score without a value, which takes a part of every query's weights (arXiv:2309.17453; learned in
gpt-oss, transformers/models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward). With outputs o and the logsumexp l
without the sink s, the sum of exponentials is exp(l') with l' = logaddexp(l, s), so the output is o exp(l - l') = o
sigmoid(l - s). With this output and l' the kernel returns the gradients of attention with the sink. The sink's gradient
is minus the sum over queries of exp(s - l') times the sums over rows of output times gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wrap.nn.kernels.available import has_triton


class FlashKernel(Protocol):
    """A flash attention. Tensors are [..., s, heads, d] with grouped queries, the logsumexp [..., heads, s] in fp32 (in
    fp64 for inputs in fp64)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Output, logsumexp, and further tensors that the backward pass needs."""

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `saved`: these three and the results of `forward`."""


class CpuKernel(NamedTuple):
    """torch's flash attention for CPUs, of tensors [b, s, heads, d]."""

    scale: float
    is_causal: bool
    """Whether attention is causal, with the first query aligned with the first key."""
    bias: Tensor | None = None
    """Added to the scores, [.., .., s_q, s_k]; None: nothing is added."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlashKernel.forward`."""
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, 0.0, self.is_causal, attn_mask=self.bias, scale=self.scale
        )
        return output.transpose(1, 2), total

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `FlashKernel.backward`."""
        *tensors, total = saved
        heads_first = (tensor.transpose(1, 2) for tensor in (grad, *tensors))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, total, 0.0, self.is_causal, attn_mask=self.bias, scale=self.scale
        )
        of_query, of_key, of_value = (gradient.transpose(1, 2) for gradient in gradients)
        return of_query, of_key, of_value


class GpuKernel(NamedTuple):
    """torch's flash attention 2: of concatenated sequences [t, heads, d] (torch/nn/attention/varlen.py), or of tensors
    [b, s, heads, d]. If causal, the last query of a sequence has the position of its last key."""

    lengths: tuple[Tensor | None, Tensor | None, int, int]
    """Cumulative numbers of queries and of keys, int32 [N + 1], None without concatenation; then the largest number of
    each."""
    scale: float
    left: int = -1
    """Number of keys before a query's own that it attends; -1: all."""
    is_causal: bool = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlashKernel.forward`."""
        output, total, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *self.lengths, 0.0, self.is_causal, False, scale=self.scale, **self._window()
        )
        return output, total

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `FlashKernel.backward`."""
        query, key, value, output, total = saved
        # without dropout the state of the random generator is not read
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty(0, device=query.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(grad.contiguous(), query, key, value, output, total, *self.lengths, 0.0, self.is_causal),
            *(random_state, unused),
            scale=self.scale,
            **self._window(),
        )
        return gradients

    def _window(self) -> dict[str, int]:
        return {"window_size_left": self.left, "window_size_right": 0 if self.is_causal else -1}


class CudnnKernel(NamedTuple):
    """cuDNN's attention, of tensors [b, s, heads, d]. Its logsumexp has a last dimension of one."""

    scale: float
    is_causal: bool
    """Whether attention is causal, with the first query aligned with the first key."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlashKernel.forward`."""
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, total, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, self.is_causal, False, scale=self.scale
        )
        return output.transpose(1, 2), total.reshape(output.shape[:3])

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `FlashKernel.backward`."""
        *tensors, total = saved
        heads_first = (tensor.transpose(1, 2) for tensor in (grad, *tensors))
        unused = torch.empty((), dtype=torch.int64, device=grad.device)  # seed and offset: there is no dropout
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(*heads_first, total.unsqueeze(-1), unused, unused, None, None, None),
            *(saved[0].shape[1], saved[1].shape[1], 0.0, self.is_causal),
            scale=self.scale,
        )
        of_query, of_key, of_value = (gradient.transpose(1, 2) for gradient in gradients)
        return of_query, of_key, of_value


class StoredScores(NamedTuple):
    """The arithmetic of a flash attention of tensors [b, s, heads, d], with a tensor of all scores: for fp32 on GPUs,
    whose kernels with grouped queries take half precision only."""

    scale: float
    is_causal: bool
    """Whether attention is causal, with the first query aligned with the first key."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlashKernel.forward`."""
        scores = self._scores(query, key)
        total = scores.logsumexp(-1)
        weights = (scores - total[..., None]).exp().to(query.dtype)
        return torch.einsum("bhqk,bkhe->bqhe", weights, _repeated(value, query)), total

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `FlashKernel.backward`."""
        query, key, value, output, total = saved
        weights = (self._scores(query, key) - total[..., None]).exp()
        sums = (grad * output).sum(-1).transpose(1, 2)[..., None]
        of_weights = torch.einsum("bqhe,bkhe->bhqk", grad, _repeated(value, query))
        of_scores = (weights * (of_weights - sums) * self.scale).to(query.dtype)
        of_query = torch.einsum("bhqk,bkhd->bqhd", of_scores, _repeated(key, query))
        of_key = torch.einsum("bhqk,bqhd->bkhd", of_scores, query)
        of_value = torch.einsum("bhqk,bqhe->bkhe", weights.to(grad.dtype), grad)
        of_groups = (each.unflatten(2, (key.shape[2], -1)).sum(3) for each in (of_key, of_value))
        return of_query, *of_groups

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", query, _repeated(key, query)) * self.scale
        scores = scores.to(torch.promote_types(query.dtype, torch.float32))
        if self.is_causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    """Each group's head for each of its query heads."""
    return tensor.repeat_interleave(query.shape[2] // tensor.shape[2], dim=2)


class SequenceBySequence(NamedTuple):
    """A kernel of tensors [b, s, heads, d] for concatenated sequences [t, heads, d], called for each that has queries:
    for CPUs and fp32 on GPUs."""

    kernel: FlashKernel
    queries: tuple[int, ...]
    """Number of queries of each sequence."""
    keys: tuple[int, ...]
    """Number of keys of each sequence."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlashKernel.forward`."""
        results = [
            self.kernel.forward(query[None, rows], key[None, used], value[None, used])
            for rows, used in self._sequences()
        ]
        outputs, totals, *_ = zip(*results, strict=True)
        return torch.cat(outputs, dim=1).squeeze(0), torch.cat(totals, dim=-1).squeeze(0)

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `FlashKernel.backward`."""
        query, key, value, output, total = saved
        of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for rows, used in self._sequences():
            inputs = (grad[None, rows], query[None, rows], key[None, used], value[None, used])
            results = self.kernel.backward(*inputs, output[None, rows], total[None, :, rows].contiguous())
            of_query[rows], of_key[used], of_value[used] = (result.squeeze(0) for result in results)
        return of_query, of_key, of_value

    def _sequences(self) -> list[tuple[slice, slice]]:
        ranges = zip(_slices(self.queries), _slices(self.keys), strict=True)
        return [(rows, used) for rows, used in ranges if rows.stop > rows.start]


def _slices(counts: tuple[int, ...]) -> list[slice]:
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]


class PaddedValues(NamedTuple):
    """A kernel that needs heads of one size, for values with smaller heads than queries and keys."""

    kernel: FlashKernel

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `FlashKernel.forward`."""
        output, total, *_ = self.kernel.forward(query, key, F.pad(value, (0, query.shape[-1] - value.shape[-1])))
        return output[..., : value.shape[-1]].contiguous(), total

    def backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `FlashKernel.backward`."""
        query, key, value, output, total = saved
        width = value.shape[-1]
        grad, value, output = (F.pad(each, (0, query.shape[-1] - width)) for each in (grad, value, output))
        of_query, of_key, of_value = self.kernel.backward(grad, query, key, value, output, total)
        return of_query, of_key, of_value[..., :width]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: FlashKernel
    ) -> Tensor:
        output, total, *others = kernel.forward(query, key, value)
        if sinks is not None:
            without, total = total, torch.logaddexp(total, sinks.to(total.dtype)[:, None])
            output = (output * _by_query(without - total).exp()).to(query.dtype)
        ctx.save_for_backward(sinks, query, key, value, output, total, *others)
        ctx.kernel = kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        sinks, *saved = ctx.saved_tensors
        output, total = saved[3:5]
        gradients = ctx.kernel.backward(grads[0], *saved)
        if sinks is None:
            return *gradients, None, None
        sums = (grads[0].to(total.dtype) * output).sum(-1).transpose(-1, -2)
        of_sinks = -((sinks.to(total.dtype)[:, None] - total).exp() * sums)
        others = [dim for dim in range(of_sinks.dim()) if dim != of_sinks.dim() - 2]
        return *gradients, of_sinks.sum(others).to(sinks.dtype), None


def _by_query(values: Tensor) -> Tensor:
    """Values by query: [..., heads, s] -> [..., s, heads, 1]."""
    return values.transpose(-1, -2)[..., None]


def merge_(output: Tensor, total: Tensor, block: Tensor, block_total: Tensor) -> None:
    """Add the attention to further keys to `output` [..., s, heads, d] and logsumexp `total` [..., heads, s], in place.
    Arithmetic is in the dtype of the logsumexps."""
    if output.is_cuda and total.dtype == torch.float32 and has_triton():
        from megatron_wrap.nn.kernels.merge_attention import merge_parts_

        packed = (tensor if output.dim() == 4 else tensor[None] for tensor in (output, total, block, block_total))
        merge_parts_(*packed)
        return
    share = _by_query(torch.sigmoid(block_total - total))
    if output.dtype == total.dtype:
        output.lerp_(block.to(total.dtype), share)
    else:
        output.copy_(output.to(total.dtype).lerp_(block.to(total.dtype), share))
    torch.logaddexp(total, block_total, out=total)


def add_(sums: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add the second tensor of each pair to the first one, which has the same shape: on a GPU in one kernel if their
    dtypes are equal."""
    totals, parts = zip(*sums, strict=True)
    torch._foreach_add_(totals, parts)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: FlashKernel) -> Tensor:
    """Differentiable attention [..., s, heads, d] by a kernel.

    Args:
        sinks: [heads], a further score of each query, without a value, see `attention_with_sinks`; None: none.
    """
    output: Tensor = _Attention.apply(query, key, value, sinks, kernel)
    return output


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
    """Causal attention within concatenated sequences on a GPU: the kernel of `nn/attention/attend.py` with sinks.

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
